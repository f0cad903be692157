"""The embedded engine computes what transformers computes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from megarl.core.protocols import SamplingParams
from tests.unit.embedded_models import (
    FAMILIES,
    VARIANTS,
    hf_logprobs,
    make_engine,
    make_model,
    make_requests,
    make_variant,
)

# Both sides are within 6e-6 of a float64 forward of these models and within 4e-6 of each other (measured); twice that,
# and room for another BLAS.
TOLERANCE = 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_transformers(family: str, tied: bool, num_kv_heads: int, temperature: float) -> None:
    model = make_model(family, tied, num_kv_heads)
    requests = make_requests(9, SamplingParams(max_new_tokens=24, temperature=temperature))
    for request, generation in zip(requests, make_engine(model).generate(requests), strict=True):
        expected = hf_logprobs(model, request.token_ids, generation.token_ids, temperature)
        np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=TOLERANCE, rtol=0)


def assert_greedy_as_in_transformers(model: PreTrainedModel) -> None:
    requests = make_requests(6, SamplingParams(max_new_tokens=24, temperature=0.0))
    for request, generation in zip(requests, make_engine(model).generate(requests), strict=True):
        ids = torch.from_numpy(request.token_ids)[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert generation.token_ids.tolist() == out[0, ids.shape[1] :].tolist()
        expected = hf_logprobs(model, request.token_ids, generation.token_ids, 1.0)
        np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family: str) -> None:
    assert_greedy_as_in_transformers(make_model(family))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_those_of_transformers(variant: str) -> None:
    assert_greedy_as_in_transformers(make_variant(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_not_the_plain_model_of_its_family(variant: str) -> None:
    """The control of the test above: with the same weights the plain family gives other log-probs."""
    family, changes = VARIANTS[variant]
    same_layers = {key: value for key, value in changes.items() if key == "num_hidden_layers"}
    plain, changed = make_model(family, **same_layers), make_variant(variant)
    [request] = make_requests(1, SamplingParams(max_new_tokens=60))
    response = np.random.default_rng(1).integers(2, 100, 60)
    of_plain, of_changed = (hf_logprobs(model, request.token_ids, response, 1.0) for model in (plain, changed))
    assert (of_plain - of_changed).abs().max() > 100 * TOLERANCE


def test_a_wrong_weight_is_seen() -> None:
    """The control of the tests above: one per cent in one matrix moves the log-probs far beyond the tolerance."""
    model = make_model("qwen3")
    request = make_requests(1, SamplingParams(max_new_tokens=24))[0]
    [generation] = make_engine(model).generate([request])
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.k_norm.weight").mul_(1.01)
    expected = hf_logprobs(model, request.token_ids, generation.token_ids, 1.0)
    assert np.abs(generation.logprobs - expected.numpy()).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_long_prompts_are_prefilled_in_pieces_and_long_contexts_are_attended_in_full(family: str) -> None:
    model = make_model(family)
    params = SamplingParams(max_new_tokens=8)
    random = np.random.default_rng(3)
    lengths = [1, 2, 3, 500, 700, 900, 1200, 1500]  # more tokens together than one prefill takes
    requests = [
        dataclasses.replace(request, token_ids=random.integers(2, 100, length))
        for request, length in zip(make_requests(len(lengths), params), lengths, strict=True)
    ]
    engine = make_engine(model, num_slots=8, max_sequence_length=1508)
    for request, generation in zip(requests, engine.generate(requests), strict=True):
        expected = hf_logprobs(model, request.token_ids, generation.token_ids, 1.0)
        # sums over a thousand positions lose a digit more
        np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=5 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_are_served_as_well_as_by_transformers(family: str) -> None:
    """Against fp32 arithmetic on the same weights, no further away than transformers in bf16 is."""
    model = make_model(family, tied=False).bfloat16()
    requests = make_requests(12, SamplingParams(max_new_tokens=24))
    generations = make_engine(model, dtype=torch.bfloat16).generate(requests)
    pairs = list(zip(requests, generations, strict=True))
    assert all(generation.logprobs.dtype == np.float32 for generation in generations)
    in_bf16 = torch.cat([hf_logprobs(model, r.token_ids, g.token_ids, 1.0) for r, g in pairs]).numpy()
    model.float()
    exact = torch.cat([hf_logprobs(model, r.token_ids, g.token_ids, 1.0) for r, g in pairs]).numpy()
    found = np.concatenate([generation.logprobs for generation in generations])
    # Medians over 288 tokens: a router on the verge may pick another expert, on either side.
    error, usual_error = (float(np.median(np.abs(values - exact))) for values in (found, in_bf16))
    assert usual_error > 100 * TOLERANCE  # it is bf16 indeed
    assert error < 1.25 * usual_error  # measured: 0.6 to 0.96

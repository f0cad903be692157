"""Models with one number per token: loaded from Hugging Face classifiers, or started fresh from a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.tiny_models import tiny_model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2 sp": (2, {"tp_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp_size": 2}),
    "cp2": (2, {"cp_size": 2}),
}
LENGTHS = (3, 50, 1, 17)


def value_job(world: Any, directory: str, sizes: dict[str, Any], sequences: list[np.ndarray]) -> dict[str, Any]:
    """The scores of sequences and the value of every token."""
    from megarl.config.model_shape import read_hf_config, shape_from_hf, value_shape_from_hf
    from megarl.config.parallel import ParallelSettings
    from megarl.models.build import ModelOptions
    from megarl.models.decoder import ValueModel
    from megarl.models.hf_weights import safetensors_weights
    from megarl.models.pipeline import forward_only
    from megarl.models.reward import RewardModel
    from megarl.models.setup import lay_out
    from tests.distributed.batches import microbatch

    config = read_hf_config(Path(directory))
    read = shape_from_hf if config["architectures"][0].endswith("ForCausalLM") else value_shape_from_hf
    layout = lay_out(world, ParallelSettings(**sizes))
    source = safetensors_weights(Path(directory))
    model = ValueModel(read(config, directory), layout, ModelOptions(), source)
    micro = microbatch([torch.from_numpy(sequence) for sequence in sequences])
    scores = RewardModel(model).score([micro, micro])
    with layout.active():
        values = forward_only(
            model.chunks, [micro], lambda output, packed: model.token_values(output, packed)[None], layout
        )
    return {"scores": scores[1].numpy(), "values": values[0][0].numpy()}


def tokens(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_classifiers_of_transformers(head: str, layout: str, gang: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen3", directory=tmp_path, head=head, num_labels=1, pad_token_id=0)
    sequences = tokens(model.config.vocab_size)
    with torch.no_grad():
        expected = [model(sequence[None]).logits[0] for sequence in sequences]
    size, sizes = LAYOUTS[layout]
    results = gang(size).run(
        value_job, parallel=sizes, directory=str(tmp_path), sizes=sizes, sequences=[s.numpy() for s in sequences]
    )
    for result in results:
        # fp32 with sums in another order; values reach 2
        if head == "ForSequenceClassification":
            assert np.abs(result["scores"] - torch.cat(expected).numpy()).max() < 1e-5
        else:
            assert np.abs(result["values"] - torch.cat(expected)[:, 0].numpy()).max() < 1e-5
    assert torch.cat(expected).abs().max() > 0.1


def test_a_language_model_gets_a_fresh_head(gang: Any, tmp_path: Path) -> None:
    model = tiny_model("llama", directory=tmp_path)
    sequences = [sequence.numpy() for sequence in tokens(model.config.vocab_size)]
    (result,) = gang(1).run(value_job, directory=str(tmp_path), sizes={}, sequences=sequences)
    assert (result["values"] == 0).all(), "a head that was never trained says nothing"


def copy_job(world: Any, directory: str, sizes: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """A language model in one layout, its weights copied into a random one in another."""
    from megarl.config.parallel import ParallelSettings
    from megarl.models.build import ModelOptions
    from megarl.models.decoder import LanguageModel
    from megarl.models.hf_weights import random_weights, safetensors_weights
    from megarl.models.setup import lay_out
    from tests.distributed.builders import shape_in

    shape = shape_in(directory)
    sources = [safetensors_weights(Path(directory)), random_weights(5, 0.1)]
    models = [
        LanguageModel(shape, lay_out(world, ParallelSettings(**size)), ModelOptions(), source)
        for size, source in zip(sizes, sources, strict=True)
    ]
    models[1].copy_from(models[0])
    return {name: tensor.numpy().copy() for bucket in models[1].export() for name, tensor in bucket}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", [{"tp_size": 2}, {"pp_size": 2}]),
        ("qwen3", [{"pp_size": 2, "vpp_size": 2}, {}]),
        ("qwen3_moe", [{"ep_size": 2}, {"tp_size": 2, "sequence_parallel": True}]),
        ("qwen3_moe", [{"pp_size": 2}, {"ep_size": 2}]),
    ],
)
def test_weights_are_copied_between_layouts(
    family: str, sizes: list[dict[str, Any]], gang: Any, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    tiny_model(family, tied=family == "qwen3", directory=tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for result in gang(2).run(copy_job, parallel=sizes[0], directory=str(tmp_path), sizes=sizes):
        assert result.keys() == expected.keys()
        assert all(np.array_equal(result[name], tensor) for name, tensor in expected.items())

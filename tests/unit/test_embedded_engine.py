"""Weights arrive whole or not at all, memory is really given back, and an engine that cannot serve says so."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from megarl.config.model_shape import shape_from_hf
from megarl.core.checksum import combine, tensor_checksum
from megarl.core.errors import EngineError
from megarl.core.protocols import Engine, GenerationRequest, SamplingParams
from megarl.generation.embedded import EmbeddedEngine
from tests.unit.embedded_models import FAMILIES, load, make_engine, make_model, make_requests, parameters_of, shape_of

PARAMS = SamplingParams(6)


def test_it_is_an_engine() -> None:
    engine: Engine = make_engine(make_model("llama"))
    assert engine.version == 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_checksum_is_that_of_the_parameters_that_were_sent(family: str, tied: bool) -> None:
    model = make_model(family, tied)
    engine = make_engine(model)
    assert engine.checksum() == combine(tensor_checksum(name, tensor) for name, tensor in parameters_of(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_named_as_in_files(family: str, tmp_path: Path) -> None:
    """What transformers saves can be sent as it is, and nothing else is asked for."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    engine = EmbeddedEngine(shape_of(model), 2, 32)
    engine.begin_weight_update()
    engine.update_weights(saved.items())
    engine.end_weight_update(1)
    assert engine.checksum() == make_engine(model).checksum()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_keep_their_bits(family: str) -> None:
    model = make_model(family).bfloat16()
    engine = make_engine(model, dtype=torch.bfloat16)
    assert engine.checksum() == combine(tensor_checksum(name, tensor) for name, tensor in parameters_of(model))
    assert engine.weight_bytes < 0.51 * make_engine(model).weight_bytes  # gaps between parameters are elements, too


@pytest.mark.parametrize("family", FAMILIES)
def test_one_bit_of_any_parameter_changes_the_checksum(family: str) -> None:
    model = make_model(family, tied=False)
    engine = make_engine(model)
    before = engine.checksum()
    for _, tensor in parameters_of(model):
        bits = tensor.detach().view(-1)[-1:].view(torch.int32)
        bits ^= 1
        load(engine, model)
        assert engine.checksum() != before
        bits ^= 1
    load(engine, model)
    assert engine.checksum() == before


def test_new_weights_are_served_under_their_version() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    requests = make_requests(3, PARAMS)
    first = engine.generate(requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    load(engine, model, version=8)
    second = engine.generate(requests)
    assert [generation.version for generation in first + second] == [1, 1, 1, 8, 8, 8]
    assert engine.version == 8
    assert any((a.token_ids != b.token_ids).any() for a, b in zip(first, second, strict=True))
    fresh = make_engine(model).generate(requests)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(fresh, second, strict=True))


def test_buckets_may_come_in_any_order_and_dtype() -> None:
    model = make_model("qwen2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    engine = EmbeddedEngine(shape_of(model), 2, 32)
    engine.begin_weight_update()
    for name, tensor in reversed(parameters_of(model)):
        engine.update_weights([(name, tensor.bfloat16())])
    engine.end_weight_update(1)
    assert engine.checksum() == make_engine(model).checksum()


def test_a_wrong_name_or_shape_is_refused_by_name() -> None:
    model = make_model("qwen2")
    engine = make_engine(model)
    engine.begin_weight_update()
    with pytest.raises(EngineError, match=r"MRL-5102 .*'model.layers.2.mlp.up_proj.weight'"):
        engine.update_weights([("model.layers.2.mlp.up_proj.weight", torch.zeros(48, 32))])
    with pytest.raises(EngineError, match=r"MRL-5102 .*tied: send model.embed_tokens.weight alone"):
        engine.update_weights([("lm_head.weight", torch.zeros(101, 32))])
    with pytest.raises(EngineError, match=r"MRL-5103 .*model.norm.weight has shape \[31\]; it must be \[32\]"):
        engine.update_weights([("model.norm.weight", torch.zeros(31))])


def test_a_layer_is_dense_or_sparse_but_not_both() -> None:
    engine = make_engine(make_model("qwen3_moe", mlp_only_layers=[1]))
    engine.begin_weight_update()
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight"):
        with pytest.raises(EngineError, match=f"MRL-5102 .*'{name}'"):
            engine.update_weights([(name, torch.zeros(48, 32))])


def test_an_incomplete_update_is_not_served_until_it_is_complete() -> None:
    model = make_model("llama")
    engine = make_engine(model)
    everything = parameters_of(model)
    engine.begin_weight_update()
    engine.update_weights(everything[3:])
    with pytest.raises(EngineError, match="MRL-5105 generate: a weight update is running"):
        engine.generate(make_requests(1, PARAMS))
    with pytest.raises(EngineError, match=r"MRL-5104 .*version 2: 3 of \d+ parameters never arrived: ") as caught:
        engine.end_weight_update(2)
    assert all(name in str(caught.value) for name, _ in everything[:3])
    assert engine.version == 1
    engine.update_weights(everything[:3])
    engine.end_weight_update(2)
    assert engine.generate(make_requests(1, PARAMS))[0].version == 2


def test_at_most_five_missing_parameters_are_named() -> None:
    engine = EmbeddedEngine(shape_of(make_model("qwen3")), 2, 32)
    engine.begin_weight_update()
    with pytest.raises(EngineError, match="MRL-5104") as caught:
        engine.end_weight_update(1)
    assert str(caught.value).count(".weight") == 5
    assert "and 19 more" in str(caught.value)


def test_an_engine_without_weights_refuses() -> None:
    engine = EmbeddedEngine(shape_of(make_model("llama")), 2, 32)
    for refuse in (lambda: engine.generate(make_requests(1, PARAMS)), engine.checksum):
        with pytest.raises(EngineError, match=r"MRL-5105 .* holds no weights"):
            refuse()
    for refuse in (lambda: engine.update_weights([]), lambda: engine.end_weight_update(1)):
        with pytest.raises(EngineError, match=r"MRL-5108 .*none is running"):
            refuse()
    engine.begin_weight_update()
    for refuse in (engine.begin_weight_update, lambda: engine.release("weights")):
        with pytest.raises(EngineError, match="MRL-5108"):
            refuse()


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_a_released_engine_refuses_and_serves_the_same_again_after_resume(family: str) -> None:
    model = make_model(family)
    engine = make_engine(model)
    requests = make_requests(5, PARAMS)
    expected = [generation.token_ids.tolist() for generation in engine.generate(requests)]
    held = engine.weight_bytes, engine.kv_bytes

    engine.release("kv_cache")
    with pytest.raises(EngineError, match="MRL-5105 generate: the KV cache is released"):
        engine.generate(requests)
    engine.release("weights")
    assert (engine.weight_bytes, engine.kv_bytes) == (0, 0)
    with pytest.raises(EngineError, match=r"MRL-5105 .*resume\('weights'\)"):
        engine.begin_weight_update()

    engine.resume("weights")
    engine.resume("kv_cache")
    assert engine.weight_bytes > 0
    with pytest.raises(EngineError, match="MRL-5105 generate: the engine holds no weights"):
        engine.generate(requests)
    load(engine, model)
    assert (engine.weight_bytes, engine.kv_bytes) == held
    engine.resume("weights")  # what is not released keeps its contents
    assert [generation.token_ids.tolist() for generation in engine.generate(requests)] == expected


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_broken_weights_give_an_error_and_leave_no_trace(family: str) -> None:
    model = make_model(family)
    engine = make_engine(model)
    requests = make_requests(6, SamplingParams(20))
    expected = [generation.token_ids.tolist() for generation in engine.generate(requests)]
    broken = [(name, torch.full_like(tensor, torch.nan)) for name, tensor in parameters_of(model)]
    engine.begin_weight_update()
    engine.update_weights(broken)
    engine.end_weight_update(2)
    with pytest.raises(EngineError, match=r"MRL-5107 .*version 2"):
        engine.generate(requests)
    load(engine, model, version=3)
    # The pool held NaN from the broken call, beyond the ends of the prompts of this one.
    assert [generation.token_ids.tolist() for generation in engine.generate(requests)] == expected


def test_released_memory_goes_back_to_the_system() -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 20_000, "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    process = psutil.Process()
    # A heap with large holes below memory in use: malloc takes large tensors from the holes, and keeps them when freed.
    raised_threshold = torch.ones(8 * 2**20 - 100)
    del raised_threshold
    *holes, in_use = (torch.ones(5 * 2**20) for _ in range(21))
    del holes
    engine = EmbeddedEngine(shape_from_hf(config, "config"), num_slots=25, max_sequence_length=512)
    weight_bytes, kv_bytes = engine.weight_bytes, engine.kv_bytes
    assert weight_bytes > 75 * 2**20
    assert kv_bytes > 200 * 2**20
    engine.begin_weight_update()
    with torch.no_grad():
        for (
            name,
            tensor,
        ) in engine._weights.items():  # small values of the right shapes, without a second model in memory
            engine.update_weights([(name, torch.full((1,), 0.01).expand(tensor.shape))])
    engine.end_weight_update(1)
    # one request that reaches the end of the pool makes every page of it resident
    engine.generate([GenerationRequest("long", np.arange(1, 511), 0, SamplingParams(2))])
    gc.collect()
    full = process.memory_info().rss
    engine.release("kv_cache")
    without_kv = process.memory_info().rss
    engine.release("weights")
    empty = process.memory_info().rss
    # 0.9: the allocator may keep a little for itself
    assert full - without_kv > 0.9 * kv_bytes
    assert without_kv - empty > 0.9 * weight_bytes
    assert in_use.all()

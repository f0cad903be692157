"""Weights from Hugging Face directories as they come: sharded, in bf16, incomplete, damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.tiny_models import tiny_model


def read_job(world: Any, directory: str) -> dict[str, np.ndarray] | str:
    """All weights after import and export, or the message of the error."""
    from megarl.core.errors import MegarlError
    from tests.distributed.builders import language_model

    try:
        model = language_model(world, directory)
    except MegarlError as error:
        return f"{error.exit_code} {error}"
    return {name: tensor.numpy() for bucket in model.export() for name, tensor in bucket}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    model = tiny_model("llama", tied=False, directory=tmp_path / "whole")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def test_sharded_bf16_weights_become_fp32(sharded: Path, gang: Any) -> None:
    weights = gang(2).run(read_job, 2, 1, directory=str(sharded))[0]
    from transformers import LlamaForCausalLM

    expected = LlamaForCausalLM.from_pretrained(sharded, dtype=torch.float32).state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(weights[name], tensor.numpy()), name


@pytest.mark.parametrize("damage", ["shard gone", "shard cut", "index broken", "tensor gone", "other shape"])
def test_damage_is_named(damage: str, sharded: Path, gang: Any) -> None:
    index = sharded / "model.safetensors.index.json"
    shard = sorted(sharded.glob("*.safetensors"))[0]
    content = json.loads(index.read_text())
    if damage == "shard gone":
        shard.unlink()
    elif damage == "shard cut":
        shard.write_bytes(shard.read_bytes()[:100])
    elif damage == "index broken":
        index.write_text('{"weight_map": 3}')
    elif damage == "tensor gone":
        del content["weight_map"]["model.norm.weight"]
        index.write_text(json.dumps(content))
    else:
        config = json.loads((sharded / "config.json").read_text()) | {"intermediate_size": 64}
        (sharded / "config.json").write_text(json.dumps(config))
    message = gang(1).run(read_job, directory=str(sharded))[0]
    expected = {
        "shard gone": ("66 MRL-4002", shard.name),
        "shard cut": ("65 MRL-2203", shard.name),
        "index broken": ("65 MRL-2203", index.name),
        "tensor gone": ("65 MRL-2201", "model.norm.weight"),
        "other shape": ("65 MRL-2202", "(64, 64)"),
    }[damage]
    assert message.startswith(expected[0]), message
    assert expected[1] in message


def decay_job(world: Any, directory: str) -> dict[str, float]:
    """The largest change of each parameter by one step with no gradient at all and a weight decay of 0.5."""
    from megarl.models.optim import OptimizerSettings
    from tests.distributed.builders import language_model, trainable

    model = language_model(world, directory)
    before = {name: parameter.detach().clone() for name, parameter in model.chunks[0].named_parameters()}
    settings = OptimizerSettings(lr=0.1, num_updates=2, weight_decay=0.5)
    trained = trainable(model, settings)
    trained.restart(settings)
    trained.zero_grad()
    trained.step()
    return {name: float((p - before[name]).abs().max()) for name, p in model.chunks[0].named_parameters()}


def test_weight_decay_spares_norms_and_biases(tmp_path: Path, gang: Any) -> None:
    tiny_model("qwen2", tied=False, directory=tmp_path)
    moved = gang(1).run(decay_job, directory=str(tmp_path))[0]
    for name, change in moved.items():
        assert (change == 0) == ("norm" in name or name.endswith(".bias")), (name, change)

"""The Megatron model is the transformers model: same weights, same logits, in every layout, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.tiny_models import DENSE, FAMILIES, tiny_model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2 sp pp2": (4, {"tp_size": 2, "pp_size": 2, "sequence_parallel": True}),
}
# Some families have no use for a layout (experts), or need help with it (tensor parallelism with experts).
OTHER_LAYOUTS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("qwen2", "tp2", 2, {"tp_size": 2}),
    ("qwen3", "pp2", 2, {"pp_size": 2}),
    ("llama", "cp2", 2, {"cp_size": 2}),
    ("llama", "pp2 vpp2", 2, {"pp_size": 2, "vpp_size": 2}),
    ("llama", "pp2 uneven", 2, {"pp_size": 2, "stage_layers": [1, 3]}),
    ("qwen3", "tp2 cp2", 4, {"tp_size": 2, "cp_size": 2, "sequence_parallel": True}),
    ("qwen3_moe", "tp1", 1, {}),
    ("qwen3_moe", "ep2", 2, {"ep_size": 2}),
    ("qwen3_moe", "pp2 vpp2", 2, {"pp_size": 2, "vpp_size": 2}),
    ("qwen3_moe", "tp2 sp", 2, {"tp_size": 2, "sequence_parallel": True}),
    ("qwen3_moe", "ep2 pp2", 4, {"ep_size": 2, "pp_size": 2}),
    ("qwen3_moe", "tp2 ep2", 4, {"tp_size": 2, "ep_size": 2, "sequence_parallel": True}),
    ("qwen3_moe", "tp2 etp1 ep2", 2, {"tp_size": 2, "etp_size": 1, "ep_size": 2, "sequence_parallel": True}),
    ("qwen2_moe", "tp1", 1, {}),
    ("qwen2_moe", "tp2 sp", 2, {"tp_size": 2, "sequence_parallel": True}),
    ("qwen2_moe", "ep2", 2, {"ep_size": 2}),
]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
LENGTHS = (3, 50, 1, 17, 17)


def packed_tokens(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]


def logits_job(world: Any, directory: str, sequences: list[np.ndarray], sizes: dict[str, Any]) -> np.ndarray:
    """Whole-vocabulary logits of packed sequences, and a check that export gives back what was imported."""
    import torch.distributed as dist

    from megarl.config.model_shape import read_hf_config, shape_from_hf
    from megarl.config.parallel import ParallelSettings
    from megarl.models.build import ModelOptions
    from megarl.models.cuts import Part
    from megarl.models.decoder import LanguageModel
    from megarl.models.hf_weights import safetensors_weights
    from megarl.models.pipeline import forward_only
    from megarl.models.setup import lay_out
    from tests.distributed.batches import microbatch

    shape = shape_from_hf(read_hf_config(Path(directory)), directory)
    source = safetensors_weights(Path(directory))
    layout = lay_out(world, ParallelSettings(**sizes))
    model = LanguageModel(shape, layout, ModelOptions(), source)
    names = set()
    for bucket in model.export():
        for name, tensor in bucket:
            whole = tuple(tensor.shape)
            assert torch.equal(tensor, source(name, whole, Part(0, 0, whole[0]))), f"{name} changed on the way"
            names.add(name)
    micro = microbatch([torch.from_numpy(s) for s in sequences])

    def read(hidden: torch.Tensor, packed: Any) -> torch.Tensor:
        logits = hidden @ model._output_weight().T
        parts = [torch.empty_like(logits) for _ in range(world.tp.size)]
        dist.all_gather(parts, logits.contiguous(), group=world.tp.group)
        return packed.to_tokens(torch.cat(parts, dim=1)[:, : shape.vocab_size].T.contiguous())

    # an interleaved pipeline needs a multiple of its stages
    microbatches = [micro] * (2 * world.pp.size)
    with layout.active():
        results = forward_only(model.chunks, microbatches, read, layout)
    return np.concatenate([results[0].T.numpy(), np.full((1, shape.vocab_size), len(names), dtype=np.float32)])


def check(model: Any, directory: Path, gang: Any, size: int, sizes: dict[str, Any]) -> None:
    from safetensors import safe_open

    sequences = packed_tokens(model.config.vocab_size)
    with torch.no_grad():
        expected = torch.cat([model(sequence[None]).logits[0] for sequence in sequences]).numpy()
    with safe_open(directory / "model.safetensors", "pt") as file:
        num_tensors = len(list(file.keys()))
    arguments = {"directory": str(directory), "sequences": [s.numpy() for s in sequences], "sizes": sizes}
    for result in gang(size).run(logits_job, parallel=sizes, **arguments):
        # fp32 and another order of summation; logits reach 5, so this is a few units in the last place
        assert np.abs(result[:-1] - expected).max() < 2e-5
        assert result[-1, 0] == num_tensors, "export must name every tensor of the file"
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", DENSE)
def test_logits_equal_transformers(family: str, tied: bool, layout: str, gang: Any, tmp_path: Path) -> None:
    model = tiny_model(family, tied=tied, directory=tmp_path)
    check(model, tmp_path, gang, *LAYOUTS[layout])


@pytest.mark.parametrize(
    ("family", "size", "sizes"),
    [(family, size, sizes) for family, _, size, sizes in OTHER_LAYOUTS],
    ids=[f"{family} {name}" for family, name, _, _ in OTHER_LAYOUTS],
)
def test_logits_of_other_layouts(family: str, size: int, sizes: dict[str, Any], gang: Any, tmp_path: Path) -> None:
    model = tiny_model(family, directory=tmp_path)
    check(model, tmp_path, gang, size, sizes)


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_embeddings(kind: str, gang: Any, tmp_path: Path) -> None:
    model = tiny_model("llama", directory=tmp_path, rope_parameters={"rope_theta": 10000.0, **ROPES[kind]})
    check(model, tmp_path, gang, 1, {})


def test_every_family_is_covered() -> None:
    assert set(FAMILIES) == set(DENSE) | {family for family, *_ in OTHER_LAYOUTS}

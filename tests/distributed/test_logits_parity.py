"""The Megatron model is the transformers model: same weights, same logits, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.tiny_models import FAMILIES, tiny_model

LAYOUTS = {"tp1": (1, 1, 1), "tp2": (2, 2, 1), "pp2": (2, 1, 2)}
LENGTHS = (3, 50, 1, 17, 17)


def packed_tokens(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]


def logits_job(world: Any, directory: str, sequences: list[np.ndarray]) -> np.ndarray | None:
    """Whole-vocabulary logits of packed sequences, and a check that export gives back what was imported."""
    import torch.distributed as dist

    from megarl.config.model_shape import read_hf_config, shape_from_hf
    from megarl.models.decoder import LanguageModel
    from megarl.models.hf_weights import safetensors_weights
    from megarl.models.pipeline import forward_only
    from tests.distributed.batches import microbatch

    shape = shape_from_hf(read_hf_config(Path(directory)), directory)
    source = safetensors_weights(Path(directory))
    model = LanguageModel(shape, world, source)
    for bucket in model.export():
        for name, tensor in bucket:
            assert torch.equal(tensor, source(name, tuple(tensor.shape))), f"{name} changed on the way in and out"
    micro = microbatch([torch.from_numpy(s) for s in sequences])

    def read(output: torch.Tensor, _: Any) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(world.tp.size)]
        dist.all_gather(parts, output.contiguous(), group=world.tp.group)
        return torch.cat(parts, dim=1)[:, : shape.vocab_size].T.contiguous()

    return forward_only(model.module, [micro], read, world)[0].T.numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tied: bool, layout: str, gang: Any, tmp_path: Path) -> None:
    model = tiny_model(family, tied=tied, directory=tmp_path)
    sequences = packed_tokens(model.config.vocab_size)
    with torch.no_grad():
        expected = torch.cat([model(sequence[None]).logits[0] for sequence in sequences]).numpy()
    size, tp_size, pp_size = LAYOUTS[layout]
    results = gang(size).run(
        logits_job, tp_size, pp_size, directory=str(tmp_path), sequences=[s.numpy() for s in sequences]
    )
    for result in results:
        # fp32 and another order of summation; logits reach 5, so this is a few units in the last place
        assert np.abs(result - expected).max() < 2e-5
    assert np.abs(expected).max() > 1

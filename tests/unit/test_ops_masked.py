"""Whitening on one rank (two ranks: tests/distributed/test_world.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megarl.core.world import World
from megarl.ops.masked import whiten
from tests.unit.one_rank import one_rank_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def test_masked_values_get_mean_zero_and_variance_one(world: World) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [3 + 5 * torch.randn(n, generator=generator) for n in (7, 1, 40)]
    masks = [(torch.rand(n, generator=generator) < 0.6).float() for n in (7, 1, 40)]
    whitened = torch.cat(whiten(values, masks, world)).numpy()
    mask = torch.cat(masks).numpy().astype(bool)
    raw = torch.cat(values).numpy().astype(np.float64)
    expected = (raw[mask] - raw[mask].mean()) / raw[mask].std()
    np.testing.assert_allclose(whitened[mask], expected, atol=1e-6)  # float32
    assert not whitened[~mask].any()
    assert whitened.dtype == np.float32


def test_an_empty_mask_gives_zeros(world: World) -> None:
    (result,) = whiten([torch.tensor([4.0, -2.0])], [torch.zeros(2)], world)
    assert result.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("values", [[3.0], [0.1] * 7], ids=["one token", "no variance"])
def test_values_without_variance_become_zero(values: list[float], world: World) -> None:
    (result,) = whiten([torch.tensor(values)], [torch.ones(len(values))], world)
    assert result.tolist() == [0.0] * len(values)


def test_a_large_mean_does_not_drown_the_differences(world: World) -> None:
    """In float32, the mean of squares less the square of the mean would be pure noise here."""
    values = 10_000 + torch.tensor([-0.5, 0.5, -0.5, 0.5])
    (result,) = whiten([values], [torch.ones(4)], world)
    assert result.tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0], rel=1e-6)

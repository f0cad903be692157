"""Two ranks know who they are and talk on the control group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.one_rank import one_rank_world


def identity_job(world: Any) -> dict[str, Any]:
    return {
        "driver": world.is_driver,
        "axes": [(axis.rank, axis.size) for axis in (world.tp, world.pp, world.dp)],
        "dp_rank_of": world.dp_rank_of,
        "last_stage": world.is_last_stage,
        "reports": world.reports_losses,
    }


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "axes", "dp_rank_of", "last_stage", "reports"),
    [
        (2, 1, [[(0, 2), (0, 1), (0, 1)], [(1, 2), (0, 1), (0, 1)]], (0, 0), [True, True], [True, False]),
        (1, 2, [[(0, 1), (0, 2), (0, 1)], [(0, 1), (1, 2), (0, 1)]], (0, 0), [False, True], [False, True]),
        (1, 1, [[(0, 1), (0, 1), (0, 2)], [(0, 1), (0, 1), (1, 2)]], (0, 1), [True, True], [True, True]),
    ],
    ids=["tp2", "pp2", "dp2"],
)
def test_ranks_know_their_place(
    tp_size: int, pp_size: int, axes: Any, dp_rank_of: tuple[int, ...], last_stage: Any, reports: Any, gang: Any
) -> None:
    results = gang(2).run(identity_job, tp_size, pp_size)
    assert [result["driver"] for result in results] == [True, False]
    assert [result["axes"] for result in results] == axes
    assert all(result["dp_rank_of"] == dp_rank_of for result in results)
    assert [result["last_stage"] for result in results] == last_stage
    assert [result["reports"] for result in results] == reports


def letter(rank: int) -> dict[str, Any]:
    """Different for every rank, in size too."""
    return {"rank": rank, "text": "ü" * (rank + 1), "array": np.arange(1000 * rank + 3), "empty": np.zeros((0, 2))}


def conversation_job(world: Any) -> dict[str, Any]:
    """Many exchanges in a row: none may leave anything behind for the next."""
    scattered, gathered, broadcast = [], [], []
    for turn in range(3):
        scattered.append(world.scatter([letter(turn), letter(turn + 1)] if world.is_driver else None))
        gathered.append(world.gather(letter(world.rank + turn)))
        broadcast.append(world.broadcast(letter(turn) if world.is_driver else None))
        world.barrier()
    return {"scattered": scattered, "gathered": gathered, "broadcast": broadcast}


def assert_same_letter(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert np.array_equal(ours[key], value)


def test_scatter_gather_broadcast(gang: Any) -> None:
    results = gang(2).run(conversation_job)
    for turn in range(3):
        for rank, result in enumerate(results):
            assert_same_letter(result["scattered"][turn], letter(turn + rank))
            assert_same_letter(result["broadcast"][turn], letter(turn))
        first, second = results[0]["gathered"][turn]
        assert_same_letter(first, letter(turn))
        assert_same_letter(second, letter(turn + 1))
        assert results[1]["gathered"][turn] is None


def whiten_job(world: Any, values: list[np.ndarray], masks: list[np.ndarray]) -> list[np.ndarray]:
    """Every data-parallel rank takes every second piece."""
    from megarl.ops.masked import whiten

    mine = slice(world.dp.rank, None, world.dp.size)
    tensors = [torch.from_numpy(value) for value in values[mine]]
    return [one.numpy() for one in whiten(tensors, [torch.from_numpy(mask) for mask in masks[mine]], world)]


@pytest.mark.parametrize("kept", [0.6, 0.0], ids=["some tokens", "no token at all"])
def test_two_ranks_whiten_like_one(kept: float, gang: Any) -> None:
    from megarl.ops.masked import whiten

    generator = np.random.default_rng(0)
    values = [(7 + 3 * generator.standard_normal(n)).astype(np.float32) for n in (11, 30, 2, 5)]
    masks = [(generator.random(len(value)) < kept).astype(np.float32) for value in values]
    masks[3][:] = 0
    first, second = gang(2).run(whiten_job, values=values, masks=masks)
    with one_rank_world() as alone:
        expected = whiten([torch.from_numpy(v) for v in values], [torch.from_numpy(m) for m in masks], alone)
    for ours, theirs in zip([first[0], second[0], first[1], second[1]], expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)  # float64 sums in another order
        assert np.isfinite(ours).all()
    assert any(one.any() for one in first) == (kept > 0)

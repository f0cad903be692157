"""State saved in one layout is read in any other, element by element; what does not fit is refused by name."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.checkpoint.geometry import overlaps, rectangles
from megarl.checkpoint.store import open_checkpoint
from megarl.core.errors import DataError
from megarl.core.slices import Box, Slice
from tests.unit.checkpoints import cut, numbers, part_of, save_layout, whole

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.bool])


@given(SHAPES, st.data())
def test_a_flat_range_is_a_few_rectangles_in_order(shape, data):
    tensor = numbers(*shape)
    low = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sides = tuple(data.draw(st.integers(1, size - first)) for size, first in zip(shape, low, strict=True))
    box = Box("w", shape, low, sides)
    start = data.draw(st.integers(0, box.num_elements))
    end = data.draw(st.integers(start, box.num_elements))
    found = rectangles(box, start, end)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    flat = part_of(tensor, box)[start:end]
    assert [one.position for one in found] == sorted(one.position for one in found)
    pieces = [part_of(tensor, Box("w", shape, one.offset, one.shape)) for one in found]
    assert torch.equal(torch.cat([torch.empty(0), *pieces]), flat)
    for one in found:
        assert torch.equal(one.of(flat).reshape(-1), part_of(tensor, Box("w", shape, one.offset, one.shape)))


def test_ranges_without_common_elements_have_no_overlap():
    left, right = Box("w", (4, 4), (0, 0), (4, 2)), Box("w", (4, 4), (0, 2), (4, 2))
    assert list(overlaps(rectangles(left, 0, 8), rectangles(right, 0, 8))) == []
    assert list(overlaps(rectangles(left, 0, 3), rectangles(left, 3, 8))) == []


@settings(max_examples=60, deadline=None)  # each writes and syncs files
@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=4), st.integers(0, 2**32), st.data())
def test_any_layout_is_filled_from_any_other(tmp_path_factory, kinds, seed, data):
    draw = random.Random(seed)
    tensors = {f"role/{number}:w": numbers(*shape, dtype=dtype) for number, (shape, dtype) in enumerate(kinds)}
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    save_layout(directory, 3, cut(tensors, data.draw(st.integers(1, 4)), draw))
    checkpoint = open_checkpoint(directory, None)
    assert checkpoint.names() == sorted(tensors)
    for slices in cut(tensors, data.draw(st.integers(1, 4)), draw, empty=True):
        checkpoint.fill(slices)
        for one in slices:
            assert torch.equal(one.tensor, part_of(tensors[one.box.name], one.box)[one.start : one.end])
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).dtype == tensor.dtype


@pytest.fixture
def checkpoint(tmp_path):
    """Two ranks hold the halves of w; of v there is only the first half."""
    top, bottom = Box("w", (4, 2), (0, 0), (2, 2)), Box("w", (4, 2), (2, 0), (2, 2))
    half = Box("v", (4,), (0,), (2,))
    save_layout(
        tmp_path / "run" / "checkpoints",
        7,
        [
            [Slice(top, 0, 4, torch.arange(4.0)), Slice(half, 0, 2, torch.ones(2))],
            [Slice(bottom, 0, 4, torch.arange(4.0, 8.0))],
        ],
    )
    return open_checkpoint(tmp_path / "run" / "checkpoints", 7)


def test_what_a_checkpoint_tells_about_itself(checkpoint):
    assert (checkpoint.step, checkpoint.progress, checkpoint.layout) == (7, {"step": 7}, {"num_ranks": 2})
    assert checkpoint.made_with["torch"] == torch.__version__
    assert checkpoint.names() == ["v", "w"]
    assert torch.equal(checkpoint.read("w"), numbers(4, 2))
    assert [checkpoint.rank_state(rank) for rank in range(3)] == [
        {"rng": torch.tensor([0])},
        {"rng": torch.tensor([1])},
        None,
    ]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (whole("u", torch.zeros(4)), "u: the checkpoint has no such tensor"),
        (whole("w", torch.zeros(2, 4)), r"w: saved with shape \(4, 2\), wanted \(2, 4\)"),
        (whole("w", torch.zeros(4, 2, dtype=torch.bfloat16)), "w: saved as F32, wanted BF16"),
        (whole("v", torch.zeros(4)), r"v: 2 of 4 elements of the part at \(0,\) are in no file"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(checkpoint, wanted, told):
    good = whole("w", torch.full((4, 2), -1.0))
    with pytest.raises(DataError, match=f"^MRL-2802 the checkpoint of step 7 does not fit this run. {told}") as caught:
        checkpoint.fill([good, wanted])
    assert caught.value.exit_code == 65
    assert torch.equal(good.tensor, torch.full((8,), -1.0))
    with pytest.raises(DataError, match=r"MRL-2802 .* u: the checkpoint has no such tensor"):
        checkpoint.read("u")


def test_memory_that_autograd_watches_is_saved_and_filled(tmp_path):
    leaf = torch.nn.Parameter(numbers(6))
    save_layout(tmp_path, 1, [[whole("w", leaf)]])
    target = torch.nn.Parameter(torch.zeros(6))
    open_checkpoint(tmp_path, 1).fill([whole("w", target)])
    assert torch.equal(target, leaf)

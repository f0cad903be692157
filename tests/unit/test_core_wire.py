"""Frames: what goes in comes out, and what is not a frame is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megarl.core import wire

DTYPES = ["int8", "int32", "int64", "uint8", "float32", "float64"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
KEYS = st.text(max_size=5).filter(lambda key: key != "\x00array")
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()  # NaNs and negative zeros too
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs or (math.isnan(ours) and math.isnan(theirs))


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_round_trip(tree: Any) -> None:
    assert_same(wire.decode(wire.encode(tree)), tree)


def test_strided_and_transposed_arrays_keep_their_order() -> None:
    whole = np.arange(24).reshape(4, 6)
    for view in (whole.T, whole[::2, 1::2], whole[::-1]):
        assert np.array_equal(wire.decode(wire.encode(view)), view)


def test_byte_order_does_not_travel() -> None:
    """A big-endian array has the name of its little-endian twin; its bytes must not be sent as they are."""
    swapped = np.arange(3, dtype=">i4")
    assert wire.decode(wire.encode(swapped)).tolist() == [0, 1, 2]


def test_decoded_arrays_own_their_memory() -> None:
    frame = bytearray(wire.encode({"x": np.zeros(4)}))
    array = wire.decode(frame)["x"]
    frame[-8:] = b"\xff" * 8
    array += 1
    assert array.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([1 + 2j]),
        np.array([True]),
        np.zeros(1, dtype="float16"),
        np.zeros(1, dtype=[("a", "i4")]),
        np.zeros(1, dtype="datetime64[s]"),
    ],
    ids=lambda array: array.dtype.name,
)
def test_other_arrays_cannot_be_sent(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        wire.encode([array])


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", 1j, np.float32(1), {1: "a number as a key"}, {"\x00array": ["int8", [0]]}],
    ids=lambda value: type(value).__name__,
)
def test_other_values_cannot_be_sent(value: Any) -> None:
    """Neither refused late nor changed silently: JSON would turn the key 1 into "1"."""
    with pytest.raises(TypeError):
        wire.encode({"inner": [value]})


def frame_of(header: Any, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x80\x04\x95pickled",
        b"\xff" * 8 + b"{}",
        frame_of({"\x00array": ["object", [1]]}, b"\x00" * 8),
        frame_of({"\x00array": ["O", [1]]}, b"\x00" * 8),
        frame_of({"\x00array": [["int8"], [1]]}, b"\x00"),
        frame_of({"\x00array": ["int8", [-1]]}, b"\x00"),
        frame_of({"\x00array": ["int8", [2**70]]}, b"\x00"),
        frame_of({"\x00array": ["int8", [0.5]]}, b"\x00"),
        frame_of({"\x00array": ["int8", None]}, b"\x00"),
        frame_of({"\x00array": ["int8"]}, b"\x00"),
        frame_of([{"\x00array": ["int8", [4]]}, {"\x00array": ["int8", [-4]]}], b"\x00" * 4),
        frame_of({}, b"left over"),
    ],
)
def test_foreign_frames_are_refused(frame: bytes) -> None:
    with pytest.raises((TypeError, ValueError)):
        wire.decode(frame)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_cut_or_lengthened_frame_is_refused(data: st.DataObject) -> None:
    frame = wire.encode({"x": np.arange(5), "y": [np.ones(3, np.float32), "text"], "z": 1})
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises((TypeError, ValueError)):
        wire.decode(frame[:cut])
    with pytest.raises((TypeError, ValueError)):
        wire.decode(frame + data.draw(st.binary(min_size=1, max_size=20)))

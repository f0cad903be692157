"""The cursor: one stream of prompts, however it is cut up and wherever it is interrupted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import ConfigError
from megarl.data.cursor import Cursor

ITEMS = st.integers(1, 20)
TAKES = st.lists(st.tuples(st.integers(0, 45), st.booleans()), max_size=8)


@given(ITEMS, st.integers(0, 2**63), st.booleans(), TAKES)
def test_restarts_and_sizes_of_takes_do_not_change_the_stream(
    num_items: int, seed: int, shuffle: bool, takes: list[tuple[int, bool]]
) -> None:
    whole = Cursor(num_items, seed, shuffle).take(sum(size for size, _ in takes))
    cursor, pieces = Cursor(num_items, seed, shuffle), []
    for size, restart in takes:
        pieces += cursor.take(size)
        if restart:
            state = json.loads(json.dumps(cursor.state()))  # as a checkpoint stores it
            cursor = Cursor(num_items, seed, shuffle)
            cursor.restore(state)
    assert pieces == whole
    assert cursor.epoch == len(whole) // num_items


@given(ITEMS, st.integers(0, 2**63), st.booleans())
def test_every_item_occurs_once_per_epoch(num_items: int, seed: int, shuffle: bool) -> None:
    stream = Cursor(num_items, seed, shuffle).take(3 * num_items)
    for epoch in range(3):
        assert sorted(stream[epoch * num_items : (epoch + 1) * num_items]) == list(range(num_items))


def test_shuffling_differs_by_epoch_and_by_seed() -> None:
    stream = Cursor(50, seed=1).take(100)
    assert stream[:50] != stream[50:]
    assert stream[:50] != Cursor(50, seed=2).take(50)
    assert Cursor(3, seed=1, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_another_stream_is_refused_on_resume() -> None:
    state = Cursor(50, seed=1).state()
    with pytest.raises(ConfigError, match="num_items: was 50, is 49"):
        Cursor(49, seed=1).restore(state)
    with pytest.raises(ConfigError, match="seed: was 1, is 2"):
        Cursor(50, seed=2).restore(state)


def test_a_cursor_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        Cursor(0, seed=1)

"""Mixtures: proportions at every moment, every row once per epoch of its source, one stream over restarts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import ConfigError, DataError
from megarl.core.sample import Prompt
from megarl.data.cursor import Cursor
from megarl.data.mixture import Mixture
from megarl.metrics.meter import Meter
from megarl.metrics.values import Sum
from megarl.rollout.prompt_stream import MixedPrompts, SourceWalk, TooLong, why_no_room

WEIGHTS = st.lists(
    st.integers(1, 50).map(float) | st.sampled_from([0.1, 0.25, 0.7, 1e-3, 33.3]), min_size=1, max_size=6
)
# (rows of a source, how many of them are too long, its weight)
SOURCES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 8), st.sampled_from([0.5, 1.0, 3.0])).filter(
        lambda one: one[1] < one[0]
    ),
    min_size=1,
    max_size=3,
)
TAKES = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8)
MAX_TOKENS = 4


class Rows:
    """Prompts in memory; the first ``num_long`` of them have one token too many."""

    num_skipped_rows = 0
    skip_report = ""

    def __init__(self, name: str, num_rows: int, num_long: int = 0, content_hash: str | None = None) -> None:
        self.content_hash = content_hash
        self._name, self._num_rows, self._num_long = name, num_rows, num_long

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Prompt:
        length = MAX_TOKENS + (index < self._num_long)
        return Prompt(f"{self._name}:{index}", "x", np.zeros(length, dtype=np.int64))


def walk(rows: Rows, seed: int = 0, too_long: TooLong = "skip", task: str | None = None) -> SourceWalk:
    measure = partial(why_no_room, max_prompt_tokens=MAX_TOKENS)
    return SourceWalk("rows.jsonl", rows, Cursor(len(rows), seed), measure, too_long, task)


def mixed(sources: Sequence[tuple[int, int, float]]) -> MixedPrompts:
    walks = [walk(Rows(str(i), num_rows, num_long), seed=i) for i, (num_rows, num_long, _) in enumerate(sources)]
    return MixedPrompts(walks, [weight for _, _, weight in sources])


@given(WEIGHTS, st.integers(1, 120))
def test_after_any_number_of_draws_every_source_has_its_share_rounded_up_or_down(
    weights: list[float], num_draws: int
) -> None:
    mixture, counts = Mixture(weights), [0] * len(weights)
    for number in range(1, num_draws + 1):
        counts[mixture.draw()] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - number * weight / sum(weights)) < 1 + 1e-9  # the ideal is computed in floats


def test_weights_are_taken_as_they_are_written() -> None:
    mixture = Mixture([0.1, 0.2, 0.7])
    drawn = [mixture.draw() for _ in range(1000)]
    assert [drawn.count(source) for source in range(3)] == [100, 200, 700]
    assert drawn[:10] == drawn[10:20]
    with pytest.raises(ValueError, match="above 0"):
        Mixture([1.0, 0.0])


@given(SOURCES, TAKES)
def test_takes_and_restarts_do_not_change_the_stream(
    sources: list[tuple[int, int, float]], takes: list[tuple[int, bool]]
) -> None:
    whole = [prompt.id for prompt in mixed(sources).draw(sum(size for size, _ in takes))]
    stream, pieces = mixed(sources), []
    for size, restart in takes:
        pieces += [prompt.id for prompt in stream.draw(size)]
        if restart:
            state = json.loads(json.dumps(stream.state()))  # as a checkpoint stores it
            stream = mixed(sources)
            stream.restore(state)
    assert pieces == whole


@given(SOURCES)
def test_every_row_that_fits_comes_once_per_epoch_of_its_source(sources: list[tuple[int, int, float]]) -> None:
    drawn = [prompt.id for prompt in mixed(sources).draw(60)]
    for i, (num_rows, num_long, _) in enumerate(sources):
        own = [name for name in drawn if name.startswith(f"{i}:")]
        fitting = {f"{i}:{row}" for row in range(num_long, num_rows)}
        for start in range(0, len(own) - len(fitting) + 1, len(fitting)):
            assert set(own[start : start + len(fitting)]) == fitting


def test_an_epoch_is_complete_when_every_source_was_walked_once() -> None:
    stream = mixed([(2, 0, 1.0), (6, 0, 1.0)])
    epochs = []
    for _ in range(24):
        stream.draw(1)
        epochs.append(stream.epoch)
    assert epochs.index(1) == 11, "six rows of the second source, and as many draws from the first"
    assert epochs[-1] == 2


def test_what_is_left_out_is_counted_once_and_replaced_from_its_source() -> None:
    stream = mixed([(4, 2, 1.0), (4, 0, 1.0)])
    drawn = [prompt.id for prompt in stream.draw(8)]
    assert sum(name.startswith("0:") for name in drawn) == 4
    turns = Cursor(4, seed=0).take(8)
    fourth = [turn for turn, row in enumerate(turns) if row >= 2][3]
    left_out = [1 for row in turns[:fourth] if row < 2]
    name, first, second = "experience_pipeline/too_long_prompts", Meter(), Meter()
    stream.report(first)
    stream.report(second)
    assert (first.statistics[name], second.statistics[name]) == (Sum(len(left_out)), Sum(0))


def test_prompts_that_are_too_long_are_refused_if_asked() -> None:
    with pytest.raises(DataError, match=r"MRL-2401 prompt 'a:.' has 5 tokens; at most 4"):
        walk(Rows("a", 2, num_long=2), too_long="error").next()


def test_a_source_without_a_prompt_that_fits_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(DataError, match=r"MRL-2014 rows.jsonl: not one of 7 prompts is short enough"):
        walk(Rows("a", 7, num_long=7)).next()


@given(st.integers(2, 9), st.integers(0, 20))
def test_the_only_prompt_that_fits_is_always_found(num_rows: int, num_before: int) -> None:
    source = walk(Rows("a", num_rows, num_long=num_rows - 1), seed=num_before)
    assert {source.next().id for _ in range(num_before + 1)} == {f"a:{num_rows - 1}"}


def test_a_task_of_the_source_replaces_that_of_its_rows() -> None:
    assert walk(Rows("a", 1)).next().task == "default"
    assert walk(Rows("a", 1), task="sums").next().task == "sums"


def test_an_accepted_file_with_as_many_rows_goes_on_among_them() -> None:
    before, after, unchanged = (walk(Rows("a", 9, content_hash=name)) for name in ("old", "new", "old"))
    for _ in range(4):
        before.next()
    after.restore(before.state())
    unchanged.restore(before.state())
    assert [after.next().id for _ in range(20)] == [unchanged.next().id for _ in range(20)]


def test_an_accepted_file_with_other_rows_begins_a_new_epoch() -> None:
    before, after = walk(Rows("a", 9, content_hash="old")), walk(Rows("a", 11, content_hash="new"))
    for _ in range(4):
        before.next()
    after.restore(before.state())
    assert after.epoch == 1
    assert {after.next().id for _ in range(11)} == {f"a:{row}" for row in range(11)}
    assert after.epoch == 2


def test_other_rows_of_the_same_file_are_refused() -> None:
    """As when a rule leaves out rows that it used to let through."""
    with pytest.raises(ConfigError, match=r"MRL-1404 .*num_items: was 9, is 8"):
        walk(Rows("a", 8, content_hash="same")).restore(walk(Rows("a", 9, content_hash="same")).state())

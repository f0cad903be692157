"""Dynamic sampling: a step draws new prompts for groups that it lost, up to a bound, and a resume draws the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.filters import FilterSettings
from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.errors import DataError
from megarl.core.protocols import Generation, GenerationRequest, OnServed, SamplingParams, Statistics
from megarl.core.sample import Group, Prompt
from megarl.core.world import World
from megarl.data.record import RecordedStep, read_steps
from megarl.data.tokenizer import load_tokenizer
from megarl.metrics.meter import Meter
from megarl.rewards.scorer import Scorer
from megarl.rollout.filters import Filters
from megarl.rollout.generated import GeneratedRollouts
from megarl.rollout.marking import Marking, keep_no_record
from megarl.rollout.recorded import RecordedRollouts, Recording, ReplayLimits
from megarl.rollout.rollout_plan import RolloutPlan
from megarl.rollout.server_rollouts import ServerRollouts
from megarl.rollout.single_turn import SingleTurn
from tests.unit.one_rank import one_rank_world, reported
from tests.unit.test_server_rollouts import ScriptedServers
from tests.unit.test_server_rollouts import rollouts as server_rollouts

PARAMS = SamplingParams(max_new_tokens=4)
NUM_ROWS = 7


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


@dataclass
class Rows:
    """Prompts that are numbers, one after the other, epoch after epoch."""

    num_drawn: int = 0

    @property
    def epoch(self) -> int:
        return self.num_drawn // NUM_ROWS

    def draw(self, num_prompts: int) -> list[Prompt]:
        first, self.num_drawn = self.num_drawn, self.num_drawn + num_prompts
        rows = [number % NUM_ROWS for number in range(first, self.num_drawn)]
        return [Prompt(str(row), str(row), np.array([1, row]), "1") for row in rows]

    def report(self, meter: Statistics) -> None: ...


def _tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed % 2**32).integers(0, 20, 4)


@dataclass
class Engine:
    """Draws what the request's seed says, and remembers what it was asked."""

    asked: list[GenerationRequest] = field(default_factory=list)

    def generate(
        self,
        version: int,
        requests: Sequence[GenerationRequest],
        timer: str,
        meter: Meter,
        statistics: Statistics,
        on_served: OnServed | None = None,
    ) -> list[Generation]:
        self.asked += requests
        return [Generation(one.id, _tokens(one.seed), np.zeros(4, np.float32), "stop", version) for one in requests]

    def report(self, statistics: Statistics) -> None: ...


# what `keep_as_told` answers, one after the other; then no
ANSWERS: list[bool] = []


def keep_as_told(group: Group) -> bool:
    return ANSWERS.pop(0) if ANSWERS else False


def keep_some(group: Group) -> bool:
    """About half of them, by what was drawn."""
    return sum(int(sample.token_ids[-1]) for sample in group.samples) % 2 == 0


def source(world: World, plan: RolloutPlan, rows: Rows, engine: Engine, keep: str) -> GeneratedRollouts:
    filters = Filters([FilterSettings(name=f"{__name__}:{keep}")])
    scorer = Scorer([RewardSettings(name="coin_flip")], ScoringSettings())
    marking = Marking(scorer, filters, plan, lambda *_: nullcontext(), keep_no_record, world)
    answering = SingleTurn(engine, load_tokenizer("builtin:characters"))
    return GeneratedRollouts(rows, answering, plan, marking)


@settings(max_examples=60, deadline=None)
@given(answers=st.lists(st.booleans(), max_size=40), wanted=st.integers(1, 5), max_refills=st.integers(0, 4))
def test_a_step_is_full_or_out_of_refills(world: World, answers: list[bool], wanted: int, max_refills: int) -> None:
    plan = RolloutPlan(wanted, 2, PARAMS, 64, 7, max_refills=max_refills)
    engine = Engine()
    ANSWERS[:] = answers
    meter = Meter()
    groups = source(world, plan, Rows(), engine, "keep_as_told").collect(1, meter)
    # what must happen, by hand
    told, num_kept, num_drawn, num_rounds = iter(answers), 0, 0, 0
    while num_kept < wanted and num_rounds <= max_refills:
        missing, num_rounds = wanted - num_kept, num_rounds + 1
        num_drawn += missing
        num_kept += sum(next(told, False) for _ in range(missing))
    assert len(groups) == num_kept <= wanted
    assert len(engine.asked) == 2 * num_drawn
    assert len({one.id for one in engine.asked}) == len({one.seed for one in engine.asked}) == len(engine.asked)
    numbers = reported(meter, world)
    assert numbers["experience_pipeline/num_drawn_groups"] == num_drawn
    assert numbers["experience_pipeline/num_refills"] == num_rounds - 1
    assert numbers["experience_pipeline/keep_ratio"] == pytest.approx(num_kept / num_drawn)
    assert numbers.get("experience_pipeline/experience_count", 0) == 2 * num_kept
    # no row was left out or drawn twice
    rows = [int(one.token_ids[1]) for one in engine.asked[::2]]
    assert rows == [number % NUM_ROWS for number in range(num_drawn)]


def shown(groups: Sequence[Group]) -> list[tuple[str, list[list[int]], list[int]]]:
    return [(g.prompt.id, [s.token_ids.tolist() for s in g.samples], [s.seed for s in g.samples]) for g in groups]


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_run_that_resumes_draws_the_same(world: World, stop_after: int) -> None:
    plan = RolloutPlan(3, 2, PARAMS, 64, 7, max_refills=2)
    rows = Rows()
    whole = source(world, plan, rows, Engine(), "keep_some")
    expected = [shown(whole.collect(step, Meter())) for step in range(1, 6)]
    assert any(len(step) == 3 for step in expected)
    first = Rows()
    before = source(world, plan, first, Engine(), "keep_some")
    seen = [shown(before.collect(step, Meter())) for step in range(1, stop_after + 1)]
    # where the data is, is all that a checkpoint has to know
    again = Rows(first.num_drawn)
    after = source(world, plan, again, Engine(), "keep_some")
    seen += [shown(after.collect(step, Meter())) for step in range(stop_after + 1, 6)]
    assert seen == expected
    assert again == rows
    assert rows.num_drawn > 15


def refilled(world: World, servers: ScriptedServers, **ahead: object) -> ServerRollouts:
    chosen = Filters([FilterSettings(name=f"{__name__}:keep_some")])
    return server_rollouts(world, servers, filters=chosen, max_refills=3, **ahead)


@pytest.mark.parametrize("ahead", [{}, {"num_steps_ahead": 1, "max_staleness": 1}, {"extra_prompts": 2}])
def test_servers_refill_too_and_go_on_after_a_restart(world: World, ahead: dict[str, int]) -> None:
    servers = ScriptedServers(slow={1} if ahead.get("extra_prompts") else set())
    whole, first = refilled(world, servers, **ahead), refilled(world, ScriptedServers(slow=servers.slow), **ahead)
    expected = [shown(whole.collect(step, Meter())) for step in range(1, 7)]
    assert all(len(step) <= 3 for step in expected)
    assert {len(step) for step in expected} >= {3}
    assert any("refill" in one.id for batch in servers.asked for one in batch)
    trained = [prompt for step in expected for prompt, *_ in step]
    assert len(set(trained)) == len(trained)
    seen = [shown(first.collect(step, Meter())) for step in range(1, 4)]
    first.settle(3, Meter())
    second = refilled(world, ScriptedServers(slow=servers.slow), **ahead)
    second.restore(first.state())
    second._prompts.next = first._prompts.next  # type: ignore[attr-defined]
    seen += [shown(second.collect(step, Meter())) for step in range(4, 7)]
    assert seen == expected


def test_servers_never_answer_a_refill_with_weights_that_are_too_old(world: World) -> None:
    servers = ScriptedServers()
    source = refilled(world, servers, num_steps_ahead=2, max_staleness=2)
    for step in range(1, 10):
        groups = source.collect(step, Meter())
        assert all(step - 1 - sample.version <= 2 for group in groups for sample in group.samples)


def test_a_step_of_which_nothing_is_left_is_recorded_and_replayed(world: World, tmp_path: Path) -> None:
    recording = Recording(tmp_path, world)
    recording.write(3, [], 2)
    assert read_steps(tmp_path / "step_000003.jsonl") == {3: RecordedStep(2, [])}
    replayed = RecordedRollouts(tmp_path, ReplayLimits(64, 64, 4, 64), world)
    assert replayed.collect(3, Meter()) == []
    assert replayed.epoch == 2
    # a file that lost everything is another thing
    (tmp_path / "step_000004.jsonl").write_text("")
    with pytest.raises(DataError):
        replayed.collect(4, Meter())

"""Rollouts of servers: what is drawn ahead, what is left behind, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.errors import ConfigError
from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.sample import Prompt, VersionSpan
from megarl.core.world import World
from megarl.data.tokenizer import load_tokenizer
from megarl.metrics.meter import Meter
from megarl.rewards.scorer import Scorer
from megarl.rollout.drafts import Draft, join, new_draft
from megarl.rollout.filters import Filters
from megarl.rollout.marking import Marking, keep_no_record
from megarl.rollout.rollout_plan import RolloutPlan
from megarl.rollout.server_rollouts import AheadPlan, ServerRollouts
from megarl.rollout.serving import ServerServing
from tests.unit.one_rank import one_rank_world

PARAMS = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as world:
        yield world


def drawn(request: GenerationRequest, version: int, num_tokens: int, finish: str = "length") -> Generation:
    """What these servers draw: the first numbers of the request's own sequence."""
    tokens = np.random.default_rng(request.seed % 2**32).integers(0, 20, num_tokens)
    return Generation(request.id, tokens, -np.ones(num_tokens, np.float32), finish, version)  # type: ignore[arg-type]


@dataclass
class ScriptedServers:
    """Servers whose answers are known beforehand. ``slow``: groups that are not finished when enough others are."""

    version: int = -1
    slow: set[int] = field(default_factory=set)
    lost_after: int | None = None
    log: list[tuple[str, object]] = field(default_factory=list)
    asked: list[list[GenerationRequest]] = field(default_factory=list)
    waited_for: list[int | None] = field(default_factory=list)

    def submit(
        self, requests: Sequence[GenerationRequest], groups: Sequence[int], versions: range, on_served: object = None
    ) -> ScriptedBatch:
        assert self.version in versions
        self.log.append(("submit", (self.version, versions)))
        self.asked.append(list(requests))
        return ScriptedBatch(self, list(requests), list(groups), self.version)

    def report(self, meter: Meter) -> None: ...


@dataclass
class ScriptedBatch:
    servers: ScriptedServers
    requests: list[GenerationRequest]
    groups: list[int]
    version: int

    def wait(self, num_groups: int | None = None) -> SimpleNamespace:
        self.servers.waited_for.append(num_groups)
        left = self.servers.lost_after
        if left is not None:  # all servers die after so many answers
            self.servers.lost_after = None
            answers = [drawn(r, self.version, r.params.max_new_tokens) for r in self.requests]
            kept = [answer if i < left else None for i, answer in enumerate(answers)]
            return SimpleNamespace(generations=kept, needs_push=True)
        slow = self.servers.slow if num_groups is not None else set()
        return SimpleNamespace(
            generations=[
                drawn(r, self.version, 3, "abort") if g in slow else drawn(r, self.version, r.params.max_new_tokens)
                for r, g in zip(self.requests, self.groups, strict=True)
            ],
            needs_push=False,
        )


class Numbers:
    """An endless stream of prompts; ten are an epoch."""

    def __init__(self) -> None:
        self.next = 0

    @property
    def epoch(self) -> int:
        return self.next // 10

    def draw(self, num_prompts: int) -> list[Prompt]:
        first, self.next = self.next, self.next + num_prompts
        return [Prompt(str(i), f"{i}", np.array([1, 2, i % 20]), "1") for i in range(first, self.next)]

    def report(self, meter: Meter) -> None: ...


def rollouts(
    world: World,
    servers: ScriptedServers,
    num_prompts: int = 3,
    filters: Filters | None = None,
    max_refills: int = 0,
    **ahead: object,
) -> ServerRollouts:
    def refresh(version: int, meter: Meter) -> None:
        if version != servers.version:
            servers.log.append(("push", version))
            servers.version = version

    def enter(phase: str, meter: Meter) -> nullcontext[None]:
        return nullcontext()

    plan = RolloutPlan(num_prompts, 2, PARAMS, 64, 7, max_refills=max_refills)
    terms = AheadPlan(**{**dict.fromkeys(AheadPlan.__slots__, 0), "carries_over": False, "last_step": 9, **ahead})  # type: ignore[arg-type]
    scorer = Scorer([RewardSettings(name="coin_flip")], ScoringSettings())
    marking = Marking(scorer, filters or Filters(), plan, enter, keep_no_record, world)
    serving = ServerServing(servers, refresh, enter, world)  # type: ignore[arg-type]
    return ServerRollouts(Numbers(), load_tokenizer("builtin:characters"), serving, plan, terms, marking, world)


def pushes(servers: ScriptedServers) -> list[object]:
    return [what for kind, what in servers.log if kind == "push"]


def test_without_staleness_every_step_draws_from_the_newest_weights(world: World) -> None:
    servers = ScriptedServers()
    source = rollouts(world, servers)
    for step in (1, 2, 3):
        groups = source.collect(step, Meter())
        assert {sample.version for group in groups for sample in group.samples} == {step - 1}
    assert [kind for kind, _ in servers.log] == ["push", "submit"] * 3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_samples_are_drawn_ahead_and_never_older_than_allowed(world: World, k: int) -> None:
    servers = ScriptedServers()
    source = rollouts(world, servers, num_steps_ahead=k, max_staleness=k)
    ages = []
    for step in range(1, 10):
        groups = source.collect(step, Meter())
        ages.append({step - 1 - sample.version for group in groups for sample in group.samples})
        assert [group.prompt.id for group in groups] == [str(i) for i in range(3 * step - 3, 3 * step)]
    assert ages == [{min(k, step - 1)} for step in range(1, 10)]
    # the samples of step s + k are asked for as soon as version s - 1 is there, and none beyond the last step
    assert pushes(servers) == list(range(9 - k))
    assert len(servers.asked) == 9


def test_what_is_drawn_ahead_survives_a_restart(world: World) -> None:
    ahead = {"num_steps_ahead": 2, "max_staleness": 2}
    whole, first = rollouts(world, ScriptedServers(), **ahead), rollouts(world, ScriptedServers(), **ahead)
    for step in (1, 2, 3):
        assert same(whole.collect(step, Meter()), first.collect(step, Meter()))
    first.settle(3, Meter())
    second = rollouts(world, ScriptedServers(version=2), **ahead)
    second._prompts.next = first._prompts.next  # type: ignore[attr-defined]  # the cursor is saved beside
    second.restore(first.state())
    for step in (4, 5, 6, 7):
        assert same(whole.collect(step, Meter()), second.collect(step, Meter()))
        assert whole.epoch == second.epoch


def test_samples_that_were_drawn_ahead_are_not_trained_on_under_other_settings(world: World) -> None:
    first = rollouts(world, ScriptedServers(), num_steps_ahead=2, max_staleness=2)
    first.collect(1, Meter())
    first.settle(1, Meter())
    second = rollouts(world, ScriptedServers(), num_steps_ahead=1, max_staleness=1)
    with pytest.raises(ConfigError, match=r"MRL-1505 .*rollout.max_staleness: was 2, is 1"):
        second.restore(first.state())


def test_a_run_that_draws_nothing_ahead_has_nothing_to_save(world: World) -> None:
    source = rollouts(world, ScriptedServers())
    source.collect(1, Meter())
    assert source.state() is None


def same(ours: Sequence, theirs: Sequence) -> bool:  # type: ignore[type-arg]
    """Every array and number; rewards and texts follow from them."""
    pairs = zip(ours, theirs, strict=True)
    return all(
        a.prompt.id == b.prompt.id
        and all(
            np.array_equal(x.token_ids, y.token_ids) and (x.version, x.spans, x.seed) == (y.version, y.spans, y.seed)
            for x, y in zip(a.samples, b.samples, strict=True)
        )
        for a, b in pairs
    )


def test_all_servers_lost_on_the_way_lose_no_sample(world: World) -> None:
    servers = ScriptedServers(lost_after=2)
    groups = rollouts(world, servers).collect(1, Meter())
    assert [len(group.samples) for group in groups] == [2, 2, 2]
    assert [len(requests) for requests in servers.asked] == [6, 4]  # only the rest is asked for again, alike
    assert servers.asked[1] == servers.asked[0][2:]


@pytest.mark.parametrize("carries_over", [False, True])
def test_slow_groups_are_left_behind_and_come_first_in_the_next_step(world: World, carries_over: bool) -> None:
    servers = ScriptedServers(slow={0})
    source = rollouts(world, servers, extra_prompts=1, max_staleness=1, carries_over=carries_over)
    first = source.collect(1, Meter())
    assert [group.prompt.id for group in first] == ["1", "2", "3"]
    servers.slow = {3}
    second = source.collect(2, Meter())
    assert [group.prompt.id for group in second] == ["0", "4", "5"]
    carried = second[0].samples[0]
    asked = servers.asked[1][0]
    if carries_over:
        assert carried.spans == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 8)) and carried.version == 0
        assert len(asked.token_ids) == 3 + 3 and asked.params.max_new_tokens == 5
        assert asked.seed != servers.asked[0][0].seed
    else:
        assert carried.spans == () and carried.version == 1
        assert asked == servers.asked[0][0]
    assert carried.num_response_tokens == 8


def test_what_would_get_too_old_is_started_anew(world: World) -> None:
    servers = ScriptedServers(slow={0})
    source = rollouts(world, servers, extra_prompts=1, max_staleness=1, carries_over=True)
    for step in (1, 2, 3):  # group 0 stays slow: at step 3 what version 0 drew would be two steps old
        source.collect(step, Meter())
    assert [len(requests[0].token_ids) for requests in servers.asked] == [3, 6, 3]
    servers.slow = set()
    groups = source.collect(4, Meter())
    assert min(sample.version for group in groups for sample in group.samples) >= 2


def test_groups_that_were_whole_when_they_were_left_behind_are_not_waited_for_again(world: World) -> None:
    servers = ScriptedServers()
    source = rollouts(world, servers, extra_prompts=2, max_staleness=1, carries_over=True)
    source.collect(1, Meter())  # nobody was slow: five whole groups, of which the step takes three
    source.collect(2, Meter())
    assert servers.waited_for == [3, 1]


def test_no_prompt_is_lost_or_trained_on_twice(world: World) -> None:
    servers = ScriptedServers()
    source = rollouts(world, servers, extra_prompts=2, max_staleness=1)
    seen: list[str] = []
    for step in range(1, 10):
        servers.slow = {step % 5, (step * 3) % 5}
        seen += [group.prompt.id for group in source.collect(step, Meter())]
    assert len(seen) == len(set(seen)) == 27
    assert set(seen) <= {str(i) for i in range(29)}


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_parts_join_without_a_gap(lengths: list[int], data: st.DataObject) -> None:
    draft = new_draft(Prompt("p", "p", np.array([1, 2])), "1/0", 1, (7, "sampling", 1, 0))
    params = SamplingParams(max_new_tokens=sum(lengths))
    tokens: list[int] = []
    version = 0
    for i, length in enumerate(lengths):
        request = draft.request(0, params)
        assert request.token_ids.tolist() == [1, 2, *tokens]
        assert request.params.max_new_tokens == sum(lengths) - len(tokens)
        version += data.draw(st.integers(0, 2))
        last = i == len(lengths) - 1
        draft.add(0, drawn(request, version, length, "length" if last else "abort"))
        assert draft.is_whole == last
        tokens += drawn(request, version, length).token_ids.tolist()
        draft = Draft.from_tree(draft.to_tree())
    whole = draft.drawn[0]
    assert whole is not None and whole.token_ids.tolist() == tokens
    edges = [0, *(span.stop for span in whole.spans)] if whole.spans else [0, len(tokens)]
    assert edges[-1] == len(tokens) and [span.start for span in whole.spans] == edges[:-1][: len(whole.spans)]
    versions = [span.version for span in whole.spans]
    assert versions == sorted(set(versions)) and whole.version == min(versions, default=whole.version)


def test_parts_of_one_version_need_no_spans() -> None:
    request = GenerationRequest("a", np.array([1]), 3, PARAMS)
    joined = join(drawn(request, 4, 3, "abort"), drawn(request, 4, 2))
    assert joined.spans == () and joined.version == 4 and joined.finish == "length"

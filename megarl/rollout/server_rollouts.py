"""Rollouts of servers: drawn ahead while the trainer trains, and not always waited for.

The samples of step ``s`` may come from weights as old as version ``s - 1 - max_staleness``. Servers that have devices
of their own get the requests of step ``s + k`` at the beginning of step ``s``, as soon as they have its weights:

    step s      wait for the samples of s, push version s - 1, ask for the samples of s + k, train on those of s

With k = 1 nothing is under way while weights are pushed: every sample comes from one version, and a run gives the same
bits every time. With k > 1 samples that are under way go on with the new weights, and their spans say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megarl.core import wire
from megarl.core.errors import ConfigError
from megarl.core.protocols import Generation
from megarl.core.sample import Group
from megarl.core.world import World
from megarl.data.tokenizer import Tokenizer
from megarl.metrics.meter import Meter
from megarl.rollout.drafts import Draft, new_draft
from megarl.rollout.marking import Marking
from megarl.rollout.prompt_stream import PromptStream
from megarl.rollout.rollout_plan import RolloutPlan
from megarl.rollout.serving import Pending, ServerServing


@dataclass(frozen=True, slots=True)
class AheadPlan:
    """How far rollouts may run ahead, and what becomes of long tails."""

    num_steps_ahead: int
    max_staleness: int
    # prompts beyond those that a step takes, so that it can leave the slowest behind
    extra_prompts: int
    carries_over: bool
    last_step: int


@dataclass(slots=True)
class _Step:
    """What is under way, or waiting to be trained on, for one step. Ranks other than the driver have empty ones."""

    drafts: list[Draft]
    epoch: int
    pending: Pending | None = None
    # of each request that was made: (draft, sample)
    asked: Sequence[tuple[int, int]] = ()


class ServerRollouts:
    """Keeps servers busy with the steps to come. The driver does the thinking; every rank keeps the same calendar."""

    def __init__(
        self,
        prompts: PromptStream,
        tokenizer: Tokenizer,
        serving: ServerServing,
        plan: RolloutPlan,
        ahead: AheadPlan,
        marking: Marking,
        world: World,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._serving = serving
        self._plan = plan
        self._ahead = ahead
        self._marking = marking
        self._world = world
        self._steps: dict[int, _Step] = {}
        # groups that a step did not wait for, oldest first
        self._left_behind: list[Draft] = []
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts when the last step's were drawn."""
        return self._epoch

    def collect(self, step: int, meter: Meter) -> Sequence[Group]:
        """The step's scored groups on the driver, [] elsewhere. Collective."""

        def draw(refill: int, num_prompts: int) -> list[Group]:
            drafts = self._refill(step, refill, num_prompts, meter) if refill else self._take(step, meter)
            return [draft.group(self._tokenizer) for draft in drafts]

        groups = self._marking.fill(step, draw, meter)
        self._marking.finish(step, groups, self._epoch, meter)
        self._prompts.report(meter)
        self._serving.report(meter)
        return groups

    def _take(self, step: int, meter: Meter) -> list[Draft]:
        """The groups that were drawn for the step; those of steps to come are asked for meanwhile. Collective."""
        newest = min(step + self._ahead.num_steps_ahead, self._ahead.last_step)
        version = self._plan.version_before(step)
        if step not in self._steps:
            self._begin(range(step, newest + 1), version, meter)
        self._finish(step, version, meter)
        later = [number for number in range(step + 1, newest + 1) if number not in self._steps]
        if later:
            self._begin(later, version, meter)
        own = self._steps.pop(step)
        self._epoch = own.epoch
        return own.drafts

    def _refill(self, step: int, refill: int, num_prompts: int, meter: Meter) -> list[Draft]:
        """New prompts in the place of groups that the step lost, answered by the newest weights. Collective.

        All are waited for: nothing of a refill is left behind, and none is under way when a checkpoint is written.
        """
        version = self._plan.version_before(step)
        self._serving.refresh(version, meter)
        own = _Step([], 0)
        if self._world.is_driver:
            own.drafts = self._new_drafts(step, refill, num_prompts)
        self._ask(own, step, None)
        self._wait(own, version, meter)
        return own.drafts

    def settle(self, step: int, meter: Meter) -> None:
        """Wait for everything that is under way after ``step``. Whoever writes the state down does this first.
        Collective.
        """
        for later in sorted(self._steps):
            self._finish(later, self._plan.version_before(step + 1), meter)

    def state(self) -> np.ndarray | None:
        """Of the driver, when all is settled: what is drawn and not trained on yet. None: nothing."""
        if not self._steps and not self._left_behind:
            return None
        tree = {
            "drawn_with": self._drawn_with(),
            "epoch": self._epoch,
            "steps": {
                str(step): {"epoch": own.epoch, "drafts": [draft.to_tree() for draft in own.drafts]}
                for step, own in self._steps.items()
            },
            "left_behind": [draft.to_tree() for draft in self._left_behind],
        }
        return np.frombuffer(wire.encode(tree), dtype=np.uint8).copy()

    def restore(self, state: np.ndarray | None) -> None:
        """Go on from what `state` gave the driver. Collective."""
        tree: dict[str, Any] = wire.decode(state.tobytes()) if state is not None else {}
        if tree:
            self._require_same(tree["drawn_with"])
            self._epoch = tree["epoch"]
            self._left_behind = [Draft.from_tree(draft) for draft in tree["left_behind"]]
            for step, own in tree["steps"].items():
                self._steps[int(step)] = _Step([Draft.from_tree(draft) for draft in own["drafts"]], own["epoch"])
        for step in self._world.broadcast(list(self._steps)):
            self._steps.setdefault(step, _Step([], 0))

    def _drawn_with(self) -> dict[str, int | float]:
        """The settings that samples which are drawn ahead depend on."""
        params = self._plan.params
        return {
            "rollout.group_size": self._plan.group_size,
            "rollout.max_new_tokens": params.max_new_tokens,
            "rollout.temperature": params.temperature,
            "rollout.top_p": params.top_p,
            "rollout.top_k": params.top_k,
            "rollout.max_staleness": self._ahead.max_staleness,
        }

    def _require_same(self, before: Mapping[str, int | float]) -> None:
        changed = [
            f"{key}: was {before[key]}, is {now}" for key, now in self._drawn_with().items() if before[key] != now
        ]
        if changed:
            raise ConfigError(
                "MRL-1505",
                "the checkpoint holds samples that were drawn ahead under other settings "
                f"({'; '.join(changed)}).\nSet them back, start over with --fresh, or give this run another run.name.",
            )

    def _begin(self, steps: Sequence[int], version: int, meter: Meter) -> None:
        """Ask for the samples of these steps, under weights ``version`` and later ones. Collective."""
        self._serving.refresh(version, meter)
        for step in steps:
            own = _Step([], 0)
            if self._world.is_driver:
                own.drafts, own.epoch = self._drafts(step), self._prompts.epoch
            self._ask(own, step, self._num_to_wait_for(own.drafts))
            self._steps[step] = own

    def _ask(self, own: _Step, step: int, num_groups: int | None) -> None:
        """Ask for what the drafts lack. ``num_groups``: how many of them ``step`` waits for; None: all."""
        drafts, newest = own.drafts, self._plan.version_before(step)
        own.asked = [(row, sample) for row, draft in enumerate(drafts) for sample in draft.open_samples]
        requests = [drafts[row].request(sample, self._plan.params) for row, sample in own.asked]
        allowed = range(max(0, newest - self._ahead.max_staleness), newest + 1)
        groups, tell = [row for row, _ in own.asked], partial(self._take_early, own)
        own.pending = Pending(requests, groups, allowed, num_groups, tell)
        self._serving.begin(own.pending)

    def _take_early(self, own: _Step, place: int, part: Generation) -> None:
        """Begin to score a sample while others are being drawn. Called from the servers' thread."""
        row, sample = own.asked[place]
        draft = own.drafts[row]
        self._marking.begin(draft.prompt, draft.finish_early(sample, part, self._tokenizer))

    def _num_to_wait_for(self, drafts: Sequence[Draft]) -> int | None:
        """Groups that a step waits for, beside those that were whole when they were left behind; None: all."""
        if not self._ahead.extra_prompts:
            return None
        return max(0, self._plan.prompts_per_step - sum(draft.is_whole for draft in drafts))

    def _drafts(self, step: int) -> list[Draft]:
        """What was left behind and is not too old to go on with, and new prompts."""
        old, self._left_behind = self._left_behind, []
        for draft in old:
            version = draft.oldest_version
            if version is not None and self._plan.version_before(step) - version > self._ahead.max_staleness:
                draft.start_over()
        num_new = self._plan.prompts_per_step + self._ahead.extra_prompts - len(old)
        return [*old, *self._new_drafts(step, 0, max(0, num_new))]

    def _new_drafts(self, step: int, refill: int, num_prompts: int) -> list[Draft]:
        name, seed_parts = self._plan.name(step, refill), self._plan.seed_parts(step, refill)
        return [
            new_draft(prompt, f"{name}/{row}", self._plan.group_size, (*seed_parts, row))
            for row, prompt in enumerate(self._prompts.draw(num_prompts))
        ]

    def _finish(self, step: int, version: int, meter: Meter) -> None:
        """Wait for the samples of a step. Collective."""
        own = self._steps[step]
        if own.pending is not None:
            self._wait(own, version, meter)
            if self._world.is_driver:
                self._leave_behind(own)

    def _wait(self, own: _Step, version: int, meter: Meter) -> None:
        """Take what was asked for. Collective."""
        assert own.pending is not None, "asked before"
        self._serving.finish(own.pending, version, "timing_s/gen", meter)
        for (row, sample), part in zip(own.asked, own.pending.generations, strict=True):
            if part is not None:
                own.drafts[row].add(sample, part)
        own.pending, own.asked = None, ()

    def _leave_behind(self, own: _Step) -> None:
        """Keep as many whole groups as a step takes; the others belong to the steps to come."""
        whole = [draft for draft in own.drafts if draft.is_whole][: self._plan.prompts_per_step]
        rest = [draft for draft in own.drafts if not any(draft is kept for kept in whole)]
        if not self._ahead.carries_over:
            for draft in rest:
                draft.start_over()
        own.drafts = whole
        self._left_behind += rest

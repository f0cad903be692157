"""Scoring of samples, as rollouts and evaluations see it: several rewards, their sum, and what becomes of failures."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megarl.config.names import REWARD_MODEL
from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core import whereabouts
from megarl.core.errors import DataError
from megarl.core.sample import Group, Prompt, Sample
from megarl.rewards.driver_calls import DriverCalls
from megarl.rewards.load import load_reward, place_of
from megarl.rewards.model_calls import ModelCalls
from megarl.rewards.outcome import Failure
from megarl.rewards.reward import Reward
from megarl.rewards.worker_calls import WorkerCalls

if TYPE_CHECKING:  # `megarl check` tries rewards, and does without torch
    from megarl.core.protocols import SampleScorer, Statistics

logger = logging.getLogger(__name__)

# after so many steps and evaluations nobody will ask for a sample any more
_PATIENCE = 100


class _Begun(NamedTuple):
    sample: Sample
    outcomes: list[Future[Reward | Failure]]
    when: int


class _Failed(NamedTuple):
    """Why a sample has no reward. ``kind`` is the same for failures that are alike; ``text`` is about this one."""

    who: str
    kind: str
    code: str
    text: str


class _Count(NamedTuple):
    """Samples of a step or an evaluation so far, and how many of them failed."""

    samples: int
    failed: int


_NOTHING = _Count(0, 0)


class Calls(Protocol):
    """A way to call one reward function."""

    def submit(self, prompt: Prompt, sample: Sample) -> Future[Reward | Failure]:
        """Begin to score a sample."""

    def close(self) -> None:
        """End what was started."""


class Scorer:
    """The rewards of a run, or of an evaluation set. Of the driver; on other ranks it never starts anything."""

    def __init__(self, rewards: Sequence[RewardSettings], settings: ScoringSettings, logs: Path | None = None) -> None:
        self._rewards = rewards
        self._settings = settings
        self._logs = logs
        self._calls: list[Calls] = []
        # of the reward `model`, on every rank; None if it is not among the rewards
        self._model = ModelCalls() if any(reward.name == REWARD_MODEL for reward in rewards) else None
        # by the sample's identity: the sample, so that its identity stays its own, and what is under way for it
        self._begun: dict[int, _Begun] = {}
        self._num_finished = 0
        # of the step that was last finished, or that refills are still being drawn for
        self._of_step = _NOTHING
        self._lock = threading.Lock()

    def judge_with(self, model: SampleScorer) -> None:
        """Let the reward `model` be this model."""
        if self._model is not None:
            self._model.use(model)

    def start(self) -> None:
        """Start the workers, so that they are warm when the first sample comes."""
        with self._lock:
            if not self._calls:
                self._calls = [self._way_to_call(reward) for reward in self._rewards]

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Begin to score a finished sample, in the background, while others are still being drawn. From any thread.

        A sample that failed already, such as a conversation whose tool hung, is not scored.
        """
        if sample.failure:
            return
        self.start()
        with self._lock:
            if id(sample) not in self._begun:
                outcomes = [calls.submit(prompt, sample) for calls in self._calls]
                for outcome in outcomes:
                    outcome.add_done_callback(_get_on)
                self._begun[id(sample)] = _Begun(sample, outcomes, self._num_finished)

    def finish(self, groups: Sequence[Group], meter: Statistics, *, is_refill: bool = False) -> list[Group]:
        """Wait until every sample of the groups has its ``reward`` and ``scores``; what was not submitted is scored
        now. Gives the groups that the policy for failed rewards leaves, in their order. Collective.

        How many may fail is said of a whole step: a refill, which may be a single group, counts with what came before.
        """
        before = self._of_step if is_refill else _NOTHING
        num_failed = self.finish_all(groups, before)
        num_samples = sum(len(group.samples) for group in groups)
        self._of_step = _Count(before.samples + num_samples, before.failed + num_failed)
        if not groups:
            return []
        kept = [group for group in groups if not any(sample.failure for sample in group.samples)]
        meter.sum("experience_pipeline/num_failed_samples", num_failed)
        meter.sum("experience_pipeline/num_failed_groups", len(groups) - len(kept))
        return kept

    def finish_all(self, groups: Sequence[Group], before: _Count = _NOTHING) -> int:
        """All groups stay: samples without a reward have a ``failure``. Gives their number. Collective."""
        for group in groups:
            for sample in group.samples:
                self.submit(group.prompt, sample)
        if self._model is not None:
            self._model.answer(groups)
        num_samples = sum(len(group.samples) for group in groups)
        failures: list[_Failed] = []
        limit = 0.0 if self._settings.on_failure == "stop" else self._settings.max_failed_fraction
        for sample in (sample for group in groups for sample in group.samples):
            with self._lock:
                begun = self._begun.pop(id(sample), None)
            if begun is None:
                failed: _Failed | None = _failed_before(sample)
            else:
                failed = self._settle(sample, [outcome.result() for outcome in begun.outcomes])
            failures += [failed] if failed else []
            count = _Count(before.samples + num_samples, before.failed + len(failures))
            if failed and count.failed > limit * count.samples:
                raise self._too_many(failed, count)
        _warn(failures, num_samples)
        self._forget()
        return len(failures)

    def close(self) -> None:
        """End what was started."""
        for calls in self._calls:
            calls.close()
        self._calls.clear()

    def _way_to_call(self, reward: RewardSettings) -> Calls:
        if reward.name == REWARD_MODEL:
            assert self._model is not None
            return self._model
        if place_of(reward.name) == "driver":
            return DriverCalls(load_reward(reward.name, reward.options), self._settings.timeout_seconds)
        return WorkerCalls(reward, self._settings, self._logs)

    def _forget(self) -> None:
        """Samples that nobody asked for in a long time were given up by whoever drew them."""
        with self._lock:
            self._num_finished += 1
            oldest = self._num_finished - _PATIENCE
            self._begun = {key: begun for key, begun in self._begun.items() if begun.when >= oldest}

    def _settle(self, sample: Sample, outcomes: Sequence[Reward | Failure]) -> _Failed | None:
        """Set the sample's reward and scores, or its failure, which is returned."""
        scores: dict[str, float] = {}
        total = 0.0
        for own, outcome in zip(self._rewards, outcomes, strict=True):
            if isinstance(outcome, Failure):
                sample.reward, sample.scores, sample.failure = None, {}, outcome.of(own.name)
                return _Failed(f'reward "{own.name}"', outcome.kind, outcome.code, sample.failure)
            label = own.shown_label
            total += own.weight * outcome.value
            scores[label] = outcome.value
            # two functions may use the same names for their scores, and a function its own label
            for name, score in outcome.scores.items():
                scores[f"{label}.{name}" if len(self._rewards) > 1 or name == label else name] = score
        sample.reward, sample.scores, sample.failure = total, scores, ""
        return None

    def _too_many(self, last: _Failed, count: _Count) -> DataError:
        if self._settings.on_failure == "stop":
            rule = "scoring.on_failure is stop"
        else:
            rule = f"scoring.max_failed_fraction={self._settings.max_failed_fraction:g} allows fewer"
        return DataError(
            "MRL-2120",
            f"{last.who} failed for {count.failed} of {count.samples} samples; {rule}. The last one:\n"
            f"    {last.code} {last.text}\n"
            "    Mend the function, or change the setting if the run can do without these samples.",
        )


def _get_on(_: Future[Reward | Failure]) -> None:
    """A score, or its failure: whoever waits for all of them gets on."""
    whereabouts.tick()


def _failed_before(sample: Sample) -> _Failed:
    code, _, text = sample.failure.partition(" ")
    return _Failed("the conversation's function", f"failed ({code})", code, text)


def _warn(failures: Sequence[_Failed], num_samples: int) -> None:
    """One line for each kind of failure, with one example."""
    examples = {(failed.who, failed.kind): failed.text for failed in reversed(failures)}
    for (who, kind), count in Counter((failed.who, failed.kind) for failed in failures).items():
        text = examples[who, kind]
        logger.warning("%s %s for %d of %d samples. One of them: %s", who, kind, count, num_samples, text)

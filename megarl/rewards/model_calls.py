"""The reward `model`, which is computed by all ranks together: samples wait until all of a step are there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from megarl.core.sample import Group, Prompt, Sample
from megarl.rewards.outcome import Failure
from megarl.rewards.reward import Reward

if TYPE_CHECKING:  # `megarl check` does without torch
    from megarl.core.protocols import SampleScorer


class ModelCalls:
    """See `rewards.scorer.Calls`. Other ranks than the driver have no samples, and take part in `answer`."""

    def __init__(self) -> None:
        self._model: SampleScorer | None = None
        # by the sample's identity, as long as anybody waits for it
        self._waiting: WeakValueDictionary[int, Future[Reward | Failure]] = WeakValueDictionary()

    def use(self, model: SampleScorer) -> None:
        """Ask this model."""
        self._model = model

    def submit(self, prompt: Prompt, sample: Sample) -> Future[Reward | Failure]:  # noqa: ARG002
        """Put the sample among those that `answer` scores. Whoever asks again waits for the same answer."""
        future: Future[Reward | Failure] | None = self._waiting.get(id(sample))
        if future is None:
            future = self._waiting[id(sample)] = Future()
        return future

    def answer(self, groups: Sequence[Group]) -> None:
        """Score all samples of the groups. Those that failed before were not submitted. Collective."""
        assert self._model is not None, "built with the run"
        for group, values in zip(groups, self._model.score(groups), strict=True):
            for sample, value in zip(group.samples, values, strict=True):
                if not sample.failure:
                    self._waiting.pop(id(sample)).set_result(_outcome(value))

    def close(self) -> None:
        """Nothing was started."""


def _outcome(value: float) -> Reward | Failure:
    if math.isfinite(value):
        return Reward(value)
    return Failure("gave no finite number", f"the model's output is {value}", "MRL-2103")

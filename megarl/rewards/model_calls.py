"""The reward `model`, which is computed by all ranks together: samples wait until all of a step are there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future

from megarl.core.protocols import SampleScorer
from megarl.core.sample import Group, Prompt, Sample
from megarl.rewards.outcome import Failure
from megarl.rewards.reward import Reward


class ModelCalls:
    """See `rewards.scorer.Calls`. Other ranks than the driver have no samples, and take part in `answer`."""

    def __init__(self) -> None:
        self._model: SampleScorer | None = None
        # by the sample's identity
        self._waiting: dict[int, Future[Reward | Failure]] = {}

    def use(self, model: SampleScorer) -> None:
        """Ask this model."""
        self._model = model

    def submit(self, prompt: Prompt, sample: Sample) -> Future[Reward | Failure]:  # noqa: ARG002
        """Put the sample among those that `answer` scores."""
        future: Future[Reward | Failure] = Future()
        self._waiting[id(sample)] = future
        return future

    def answer(self, groups: Sequence[Group]) -> None:
        """Score all samples of the groups, which are submitted. Collective."""
        assert self._model is not None, "built with the run"
        for group, values in zip(groups, self._model.score(groups), strict=True):
            for sample, value in zip(group.samples, values, strict=True):
                self._waiting.pop(id(sample)).set_result(_outcome(value))

    def close(self) -> None:
        """Nothing was started."""


def _outcome(value: float) -> Reward | Failure:
    if math.isfinite(value):
        return Reward(value)
    return Failure("gave no finite number", f"the model's output is {value}", "MRL-2103")

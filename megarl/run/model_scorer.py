"""The reward `model`: samples are dealt to the reward model's ranks, and its scores come back to the driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.core.sample import Group
from megarl.data.distribute import distribute
from megarl.data.pack import FILLER, PackPlan, pack
from megarl.models.reward import RewardModel


class ModelScorer:
    """See `core.protocols.SampleScorer`. The reward model may be laid out differently from the policy: ``plan`` cuts
    the samples for its own data-parallel ranks.
    """

    def __init__(self, model: RewardModel, plan: PackPlan) -> None:
        self._model = model
        self._plan = plan
        self._world = model.model.layout.world

    def score(self, groups: Sequence[Group]) -> list[list[float]]:
        """The head's number at each sample's last token. Collective."""
        counts = [len(group.samples) for group in groups]
        if not self._world.broadcast(sum(counts)):
            return [[] for _ in counts]
        batch = distribute(pack(groups, self._plan) if self._world.is_driver else None, self._world)
        microbatches = list(batch.microbatches())
        scores = torch.cat(self._model.score(microbatches)).float().cpu()
        indices = torch.cat([micro.sample_index for micro in microbatches]).cpu()
        # Ranks with the same data-parallel coordinate have said the same.
        is_heard = self._world.rank == self._world.dp_rank_of.index(self._world.dp.rank)
        gathered = self._world.gather([indices.numpy(), scores.numpy()] if is_heard else None)
        if gathered is None:
            return []
        score_of = {
            index: score
            for said in gathered
            if said is not None
            for index, score in zip(said[0].tolist(), said[1].tolist(), strict=True)
            if index != FILLER
        }
        ends = torch.tensor(counts).cumsum(0).tolist()
        return [[score_of[index] for index in range(end - n, end)] for n, end in zip(counts, ends, strict=True)]

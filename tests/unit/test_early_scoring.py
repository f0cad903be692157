"""Samples of servers are scored while others are being drawn, and the step gets the very samples that were scored."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.protocols import GenerationRequest, OnServed
from megarl.core.sample import Group, Prompt, Sample
from megarl.metrics.meter import Meter
from tests.unit.one_rank import one_rank_world
from tests.unit.test_server_rollouts import ScriptedBatch, ScriptedServers, drawn, rollouts


class EagerServers(ScriptedServers):
    """Tells of every other answer at once."""

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        groups: Sequence[int],
        versions: range,
        on_served: OnServed | None = None,  # type: ignore[override]
    ) -> ScriptedBatch:
        assert on_served is not None
        for place in range(0, len(requests), 2):
            on_served(place, drawn(requests[place], self.version, requests[place].params.max_new_tokens))
        return super().submit(requests, groups, versions)


def test_early_samples_are_those_of_the_step() -> None:
    begun: list[Sample] = []

    def collect(servers: ScriptedServers) -> list[Sequence[Group]]:
        with one_rank_world() as world:
            source = rollouts(world, servers)
            begin = source._marking.begin

            def note(prompt: Prompt, sample: Sample) -> None:
                begun.append(sample)
                begin(prompt, sample)

            source._marking.begin = note  # type: ignore[method-assign]
            return [source.collect(step, Meter()) for step in (1, 2)]

    late, early = collect(ScriptedServers()), collect(EagerServers())
    assert len(begun) == 2 * 3, "every other one of three groups of two, in two steps"
    for before, after in zip(late, early, strict=True):
        for one, other in zip(before, after, strict=True):
            assert [sample.response for sample in one.samples] == [sample.response for sample in other.samples]
            assert [sample.reward for sample in one.samples] == [sample.reward for sample in other.samples]
    kept = {id(sample) for groups in early for group in groups for sample in group.samples}
    assert {id(sample) for sample in begun} <= kept

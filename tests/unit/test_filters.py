"""Which groups are trained on: the built-in filters, functions of the user's, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megarl.config.filters import FilterSettings
from megarl.core.errors import ConfigError, DataError
from megarl.core.sample import Group
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.metrics.registry import check
from megarl.rollout.filters import Filters
from tests.unit.groups import group_with, sample_with
from tests.unit.one_rank import one_rank_world, reported


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def scored(*rewards: float) -> Group:
    return group_with([sample_with(reward) for reward in rewards])


def filters(*names: str | dict[str, Any]) -> Filters:
    return Filters([FilterSettings(**({"name": one} if isinstance(one, str) else one)) for one in names])


def left(group: Group, name: str, **options: Any) -> list[Group]:
    return filters({"name": name, "options": options}).apply([group], Meter())


def test_groups_without_differences_are_dropped() -> None:
    assert left(scored(1.0, 1.0, 1.0), "zero_variance") == []
    mixed = scored(1.0, 1.0, 0.5)
    assert left(mixed, "zero_variance")[0] is mixed


def test_samples_that_were_cut_leave_their_group() -> None:
    samples = [sample_with(1.0), sample_with(0.0), sample_with(0.0, finish="length"), sample_with(1.0, num_tokens=9)]
    group = group_with(samples)
    assert left(group, "length")[0].samples == [samples[0], samples[1], samples[3]]
    assert left(group, "length", max_tokens=8)[0].samples == samples[:2]
    assert left(group, "length", max_tokens=9)[0].samples == [samples[0], samples[1], samples[3]]
    assert left(group, "length", drop="group") == []
    assert group.samples == samples  # the group itself is as it was


def test_a_group_of_which_one_sample_is_left_has_nothing_to_compare() -> None:
    assert left(group_with([sample_with(1.0), sample_with(0.0, finish="length")]), "length") == []
    assert len(left(group_with([sample_with(1.0)]), "length")) == 1  # it never had more


@pytest.mark.parametrize(("options", "kept"), [({"low": 0.5}, True), ({"low": 0.6}, False), ({"high": 0.4}, False)])
def test_groups_outside_a_range_of_rewards_are_dropped(options: dict[str, float], kept: bool) -> None:
    assert bool(left(scored(1.0, 0.0), "reward_range", **options)) is kept


def keep_two(group: Group, at_least: float = 2.0) -> bool:
    return sum(sample.reward or 0 for sample in group.samples) >= at_least


def test_a_function_of_the_users_decides() -> None:
    path = f"{__name__}:keep_two"
    assert left(scored(1.0, 1.0), path)
    assert not left(scored(1.0, 0.0), path)
    assert left(scored(1.0, 0.0), path, at_least=1.0)


def raising(group: Group) -> bool:
    raise ValueError(f"\x1b[31mred {group.prompt.id}")


def leaving(group: Group) -> bool:
    raise SystemExit(3)


def undecided(group: Group) -> Any:
    return 1


async def waiting(group: Group) -> bool:
    return True


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("raising", "MRL-2410", "test_filters.py:"),
        ("leaving", "MRL-2410", "SystemExit"),
        ("undecided", "MRL-2411", "int"),
    ],
)
def test_a_mistake_in_it_ends_the_run_with_the_place(name: str, code: str, text: str) -> None:
    with pytest.raises(DataError) as caught:
        left(scored(1.0), f"{__name__}:{name}")
    assert caught.value.code == code
    assert caught.value.exit_code == 65
    assert text in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(("name", "options"), [("waiting", {}), ("keep_two", {"at_most": 1}), ("Iterator", {})])
def test_a_function_that_cannot_be_called_is_refused_before_the_run(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        filters({"name": f"{__name__}:{name}", "options": options})


def test_what_is_dropped_is_counted_by_filter_in_their_order(world: World) -> None:
    meter = Meter()
    equal, short, cut = scored(1.0, 1.0), scored(0.0, 1.0), [sample_with(1.0), sample_with(0.0, finish="length")]
    kept = filters("length", "zero_variance").apply([equal, short, group_with(cut), equal], meter)
    assert kept == [short]
    numbers = reported(meter, world)
    assert {name: value for name, value in numbers.items() if name.startswith("experience_pipeline")} == {
        "experience_pipeline/filter/length/dropped_groups": 1,
        "experience_pipeline/filter/length/dropped_samples": 2,
        "experience_pipeline/filter/zero_variance/dropped_groups": 2,
        "experience_pipeline/filter/zero_variance/dropped_samples": 4,
    }
    assert {"time/experience_pipeline/operator/0_length", "time/experience_pipeline/total"} <= numbers.keys()
    for name in numbers:
        check(name)

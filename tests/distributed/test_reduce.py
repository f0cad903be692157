"""Two real processes with different metrics report what one process with all the data would."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.core.world import Axis, World
from megarl.metrics.meter import Meter
from megarl.metrics.reduce import reduce_to_driver

TOKENS = [0.5, -1.0, 3.0, 2.0, 8.0, -2.5]


def join_world(rank: int, size: int, store: Path) -> World:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    axes = dict.fromkeys(("tp", "dp", "cp", "ep", "etp", "edp"), Axis(0, 1, group)) | {"pp": Axis(rank, size, group)}
    return World(rank, size, rank, torch.device("cpu"), group, dp_rank_of=(0,) * size, **axes)


def first_step(rank: int, size: int) -> Meter:
    """The driver has times and scores, the last rank losses; both have tokens, a phase and a device."""
    meter = Meter()
    tokens = TOKENS[rank::size]
    meter.mean("actor/entropy", sum(tokens), len(tokens))
    meter.max("actor/ratio_max", max(tokens))
    meter.sum("perf/total_num_tokens", len(tokens))
    mean = sum(tokens) / len(tokens)
    meter.moments("critic/returns/var", len(tokens), mean, sum((x - mean) ** 2 for x in tokens))
    meter.span("time/actor_train/train_step", 1.0, 2.0 + rank, 0.5, 3.5 + rank)
    meter.gauge("memory/actor_train/train_step/end/onload/allocated", 7.0 + rank)
    meter.driver_sum("timing_s/gen", 4.0 + 100 * rank)
    if rank == 0:
        meter.last("critic/lr", 0.25)
    if rank == size - 1:
        for partial in (0.5, 1.0, 1.5):
            meter.loss("actor/pg_loss", partial)
        meter.loss("actor/pg_loss", 0.0, num_updates=2)
        meter.mean("actor/ppo_kl", math.nan, 1)
        meter.mean("actor/pg_clipfrac", 0.0, 0)
    return meter


def run(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    live(rank, 2, directory)
    if rank == 0:
        live(0, 1, directory)


def live(rank: int, size: int, directory: str) -> None:
    """Some steps of a run of ``size`` ranks; what this rank saw is left in a file."""
    world = join_world(rank, size, Path(directory) / f"store{size}")
    steps = [reduce_to_driver(first_step(rank, size), world)]
    steps.append(reduce_to_driver(first_step(rank, size), world))  # nothing new: no second agreement

    later = Meter()  # a metric that only the other rank knows appears, all others are gone
    if rank == size - 1:
        later.sum("weights/push_bytes", 0)
    steps.append(reduce_to_driver(later, world))

    conflict = Meter()
    (conflict.sum if rank == 0 else conflict.max)("mine", 1.0)
    error = ""
    try:
        reduce_to_driver(conflict, world)
    except TypeError as caught:
        error = str(caught)
    after = reduce_to_driver(first_step(rank, size), world)  # a conflict leaves the ranks in step
    assert (after is None) == (rank != 0)
    outcome = {"steps": steps, "error": error}
    (Path(directory) / f"{size}_{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(run, args=(str(directory),), nprocs=2)
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}


def test_only_the_driver_gets_the_result(outcomes):
    assert outcomes["2_1"]["steps"] == [None, None, None]


def test_two_ranks_with_different_metrics(outcomes):
    first, second, _ = outcomes["2_0"]["steps"]
    assert math.isnan(first.pop("actor/ppo_kl"))
    assert math.isnan(second.pop("actor/ppo_kl"))
    assert first == second
    mean = sum(TOKENS) / 6
    assert first == pytest.approx(
        {
            "actor/entropy": mean,
            "actor/pg_loss": 1.5,
            "actor/ratio_max": 8.0,
            "critic/lr": 0.25,
            "critic/returns/var": sum((x - mean) ** 2 for x in TOKENS) / 6,
            "memory/actor_train/train_step/end/onload/allocated/0": 7.0,
            "memory/actor_train/train_step/end/onload/allocated/1": 8.0,
            "perf/total_num_tokens": 6.0,
            "time/actor_train/train_step/execute": 3.0,
            "time/actor_train/train_step/offload": 0.5,
            "time/actor_train/train_step/onload": 1.0,
            "time/actor_train/train_step/skew": 1.0,
            "time/actor_train/train_step/total": 4.5,
            "timing_s/gen": 4.0,
        },
        rel=1e-12,  # float64 sums of six numbers
    )
    assert all(type(value) is float for value in first.values())


def test_one_process_with_all_the_data_agrees(outcomes):
    two, one = outcomes["2_0"]["steps"][0], outcomes["1_0"]["steps"][0]
    shared = ("actor/entropy", "actor/pg_loss", "actor/ratio_max", "critic/lr", "critic/returns/var", "timing_s/gen")
    assert {name: two[name] for name in shared} == pytest.approx({name: one[name] for name in shared}, rel=1e-6)
    assert "actor/pg_clipfrac" not in one


@pytest.mark.parametrize("driver", ["2_0", "1_0"])
def test_metrics_may_come_and_go(outcomes, driver):
    assert outcomes[driver]["steps"][2] == {"weights/push_bytes": 0.0}


def test_one_name_with_two_kinds_fails_on_every_rank(outcomes):
    message = "metric 'mine' is a sum on one rank and a max on another"
    assert outcomes["2_0"]["error"] == outcomes["2_1"]["error"] == message
    assert outcomes["1_0"]["error"] == ""

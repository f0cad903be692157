"""What launchers leave in the environment, further: hosts with ports, special steps, mpirun, lists of devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarl.config.load import load_config
from megarl.core.errors import ConfigError
from megarl.launch.rendezvous import identify, num_idle_nodes, read_rendezvous
from megarl.launch.watch import RankState, Watch
from megarl.run.stop import StopRequest
from tests.e2e.runs import ROOT, environment
from tests.unit.config_files import QUICKSTART
from tests.unit.test_launch_rendezvous import BATCH_SHELL, refused, slurm, torchrun

# of a job, in this order: the shell of salloc, the batch script, what looks after other programs
SPECIAL_STEPS = ("4294967290", "4294967291", "4294967292")


@pytest.mark.parametrize("step", SPECIAL_STEPS)
def test_special_steps_of_slurm_are_no_ranks(step: str) -> None:
    assert identify({**BATCH_SHELL, "SLURM_STEP_ID": step}) is None
    assert identify(slurm(SLURM_STEP_ID="4294967279")) is not None  # the last one of srun


def test_jobs_of_a_federation_have_long_numbers() -> None:
    record = identify(slurm(SLURM_JOB_ID="2147483649"))
    assert record is not None and record.master_port == 23649


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("10.0.0.1:29600", "Write MASTER_ADDR=10.0.0.1 MASTER_PORT=29600"),
        ("tcp://10.0.0.1", "Write MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"),
        ("tcp://node-1.cluster:80/", "Write MASTER_ADDR=node-1.cluster MASTER_PORT=80"),
        ("[::1]:29600", "Write MASTER_ADDR=::1 MASTER_PORT=29600"),
        ("node 1", "Write MASTER_ADDR="),
    ],
)
def test_a_master_that_is_no_host_is_refused_with_what_to_write(written: str, hint: str) -> None:
    for launcher in (torchrun, slurm):
        message = refused(launcher(MASTER_ADDR=written))
        assert f"MRL-1602 MASTER_ADDR={written!r} is not a host" in message
        assert hint in message


@pytest.mark.parametrize(("written", "address"), [("[::1]", "::1"), ("fe80::1%eth0", "fe80::1%eth0"), ("n_1", "n_1")])
def test_hosts_and_addresses_are_taken(written: str, address: str) -> None:
    record = identify(torchrun(MASTER_ADDR=written))
    assert record is not None and record.master_address == address


def test_an_unknown_host_is_told_before_torch_is_loaded() -> None:
    code = (
        "import sys; from megarl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    own = environment(**torchrun(per_node=2, num_nodes=1, MASTER_ADDR="no-such-host.invalid"))
    command = [sys.executable, "-c", code, "train", str(QUICKSTART)]
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stderr
    assert done.stderr.startswith("MRL-1606 ")


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpirun_starts_no_ranks(name: str) -> None:
    message = refused({name: "2"})
    assert message.startswith("MRL-1601 mpirun is not a launcher of megarl")
    assert identify({name: "1"}) is None
    assert identify({name: "2", **torchrun()}) is not None
    assert identify({name: "2", **slurm()}) is not None


def test_nodes_of_a_job_that_stay_idle_are_told() -> None:
    assert num_idle_nodes({**BATCH_SHELL, "SLURM_JOB_NUM_NODES": "2"}) == 1
    assert num_idle_nodes({**BATCH_SHELL, "SLURM_NNODES": "1"}) == 0
    assert num_idle_nodes(slurm(per_node=1, num_nodes=1, SLURM_JOB_NUM_NODES="2")) == 0  # asked for one of them
    assert num_idle_nodes({}) == 0


@pytest.mark.parametrize("listed", ["", "-1", "NoDevFiles", "-1,0,1", "x,0"])
def test_hidden_devices_leave_the_cpu(listed: str) -> None:
    config = load_config(QUICKSTART, [])
    assert read_rendezvous(torchrun(num_nodes=1, CUDA_VISIBLE_DEVICES=listed), config) is not None


@pytest.mark.parametrize("listed", ["0", "0,-1,1", "GPU-1a2b,x", "MIG-7"])
def test_a_list_of_devices_ends_at_the_first_that_is_none(listed: str) -> None:
    with pytest.raises(ConfigError, match="shows it 1 GPUs"):
        read_rendezvous(torchrun(num_nodes=1, CUDA_VISIBLE_DEVICES=listed), load_config(QUICKSTART, []))


@pytest.mark.parametrize(("size", "advice"), [(2, "cannot have 2"), (4, "Add run.num_ranks=4")])
def test_only_a_number_of_ranks_that_would_be_accepted_is_advised(size: int, advice: str) -> None:
    settings = ["run.num_ranks=8", "actor.parallel.tp_size=2", "actor.parallel.pp_size=2"]
    with pytest.raises(ConfigError, match=advice) as caught:
        read_rendezvous(torchrun(per_node=size, num_nodes=1), load_config(QUICKSTART, settings))
    assert caught.value.code == "MRL-1110"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (torchrun(WORLD_SIZE="0"), "MRL-1602 torchrun says that the size is 0.\nThere is at least one"),
        (torchrun(LOCAL_WORLD_SIZE="0"), "MRL-1602 torchrun says that the local size is 0"),
        (torchrun(rank=1, num_nodes=1, LOCAL_RANK="0"), "MRL-1602 torchrun made this process rank 1 of all and rank 0"),
        (torchrun(num_nodes=1, GROUP_WORLD_SIZE="2"), "torchrun says 2 ranks in all, 2 on this node, on 2 nodes"),
        (torchrun(num_nodes=2, GROUP_WORLD_SIZE="1"), "torchrun says 4 ranks in all, 2 on this node, on 1 node,"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(environment: dict[str, str], message: str) -> None:
    assert message in refused(environment)


# -- what a watch knows of ranks that meet


def test_ranks_that_do_not_get_connected_are_named() -> None:
    watch = Watch({rank: RankState(rank, f"node-{rank}", 0.0, 0.0) for rank in range(3)}, None, join_timeout=10.0)
    for rank, phase in enumerate(("join", "join", "layout")):
        watch.ranks[rank].take({"phase": phase, "at": 1.0})
    assert watch.judge(11.5) is None  # who came last may still connect
    verdict = watch.judge(17.0)
    assert verdict is not None and verdict.exit_code == 69
    assert verdict.message.startswith("MRL-5306 rank 0 on node-0, rank 1 on node-1 could not connect")
    assert "unset GLOO_SOCKET_IFNAME" in verdict.message


def test_a_watch_waits_a_moment_for_those_who_know_of_it() -> None:
    """The driver failed; a rank that did so as well, and is about to report, must not find nobody."""
    for size, is_patient in ((1, False), (2, True)):
        watch = Watch({0: RankState(0, "a", 0.0, 0.0)}, None, size=size)
        watch.ranks[0].ended, watch.ranks[0].words = 5.0, ("MRL-1607 they differ", 64)
        assert (watch.judge(5.0) is None) == is_patient


def test_one_request_is_enough_while_there_is_nothing_to_save() -> None:
    request = StopRequest()
    request.leaves_at_once = True
    assert request.take(15, 10.0)

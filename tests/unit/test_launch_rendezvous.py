"""From the environment of any launcher to one record; what is missing or contradicts itself is named."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cli import main
from megarl.config.load import load_config
from megarl.core.errors import ConfigError, EngineError, MegarlError
from megarl.launch.hostlist import expand_hosts, expand_tasks
from megarl.launch.network import choose_interface, interface_of, own_address
from megarl.launch.rendezvous import HANDED_OVER, RankRecord, hand_over, identify, local_record, read_rendezvous
from tests.unit.config_files import MINIMAL, QUICKSTART, load_text


def torchrun(rank: int = 0, per_node: int = 2, num_nodes: int = 2, **changes: str) -> dict[str, str]:
    """What torchrun sets for one rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(per_node * num_nodes),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **changes,
    }


def slurm(rank: int = 0, per_node: int = 2, num_nodes: int = 2, **changes: str) -> dict[str, str]:
    """What srun sets for one task."""
    return {
        **BATCH_SHELL,
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(per_node * num_nodes),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(num_nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})",
        "SLURM_STEP_NODELIST": f"node[07-{6 + num_nodes:02}]",
        **changes,
    }


# the shell of an sbatch script: seen in Slurm 22.05.8, which sets SLURM_STEP_ID only for tasks of srun
BATCH_SHELL = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def refused(environment: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        identify(environment)
    return str(caught.value)


# -- every launcher


def test_nobody_launched_this() -> None:
    assert identify({}) is None
    assert identify({"MASTER_ADDR": "10.0.0.1", "PATH": "/bin"}) is None


def test_torchrun() -> None:
    record = identify(torchrun(rank=3, TORCHELASTIC_RESTART_COUNT="1"))
    assert record == RankRecord("torchrun", 3, 4, 1, 2, 1, 2, "10.0.0.1", 29500, 1, "agent://10.0.0.1:29500/1", 1)


def test_srun() -> None:
    record = identify(slurm(rank=3))
    assert record == RankRecord("slurm", 3, 4, 1, 2, 1, 2, "node07", 24711, 1, "tcp://node07:24711", 0)
    moved = identify(slurm(rank=3, MASTER_ADDR="10.0.0.9", MASTER_PORT="1234", SLURM_RESTART_COUNT="2"))
    assert moved == replace(
        record, master_address="10.0.0.9", master_port=1234, meeting="tcp://10.0.0.9:1234", num_restarts=2
    )


def test_two_steps_of_a_job_do_not_meet() -> None:
    first, second = identify(slurm()), identify(slurm(SLURM_STEP_ID="1"))
    assert first is not None and second is not None
    assert first.master_port != second.master_port


def test_the_shell_of_a_batch_script_is_no_rank() -> None:
    assert identify(BATCH_SHELL) is None
    assert identify({**BATCH_SHELL, "SLURM_STEP_ID": "batch"}) is None


def test_an_interactive_step_is_no_rank_of_a_larger_run(tmp_path: Path) -> None:
    shell = slurm(per_node=1, num_nodes=1)
    assert read_rendezvous(shell, load_config(QUICKSTART, [])) is None  # two ranks, to be started here
    assert read_rendezvous(shell, load_text(tmp_path, MINIMAL)) is not None


def test_torchrun_inside_srun_wins() -> None:
    assert identify(slurm() | torchrun(rank=2)) == identify(torchrun(rank=2))
    message = refused(slurm() | torchrun(rank=1, num_nodes=1))
    assert "MRL-1603 srun started 2 nodes, but torchrun inside it knows 1" in message


@given(
    st.sampled_from([torchrun, slurm]),
    st.integers(1, 9),
    st.integers(1, 40),
    st.data(),
)
def test_all_ranks_of_a_launcher_make_one_world(
    launcher: Callable[..., dict[str, str]], per_node: int, num_nodes: int, data: st.DataObject
) -> None:
    size = per_node * num_nodes
    records = [identify(launcher(rank, per_node, num_nodes)) for rank in range(size)]
    assert [record.rank for record in records if record] == list(range(size))
    assert {(r.size, r.num_nodes, r.master_address, r.master_port, r.meeting) for r in records if r} == {
        (size, num_nodes, records[0].master_address, records[0].master_port, records[0].meeting)  # type: ignore[union-attr]
    }
    assert len({(r.node_rank, r.local_rank) for r in records if r}) == size
    record = data.draw(st.sampled_from(records))
    assert record is not None
    # whatever a rank was started with, a process that it hands its record to is the same rank
    assert identify(hand_over(record)) == record


_NAMES = sorted({*torchrun(), *slurm(), HANDED_OVER, "CUDA_VISIBLE_DEVICES"})
_VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["", "x", "1e3", "²", "node[1-2]", "2(x2)", "[", "{}"]),
    st.text("0123456789-[](),x "),
)


@given(st.dictionaries(st.sampled_from(_NAMES), _VALUES), st.sampled_from([{}, torchrun(1), slurm(1)]))
def test_any_environment_gives_a_consistent_record_or_a_message(changes: dict[str, str], base: dict[str, str]) -> None:
    try:
        record = identify({**base, **changes})
    except ConfigError as error:
        assert error.code in ("MRL-1601", "MRL-1602", "MRL-1603", "MRL-1604")
        return
    if record is not None:
        assert 0 <= record.rank < record.size
        assert 0 <= record.local_rank < record.local_size <= record.size
        assert 0 <= record.node_rank < record.num_nodes <= record.size


@given(st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]))
def test_what_torchrun_did_not_set_is_named(name: str) -> None:
    environment = torchrun(rank=1)
    del environment[name]
    assert f"MRL-1601 {name} is not set" in refused(environment)


# -- gaps and contradictions


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (torchrun(RANK="4"), "MRL-1602 torchrun gave this process rank 4, but the size is 4"),
        (torchrun(LOCAL_RANK="2"), "MRL-1602 torchrun gave this process local rank 2, but the local size is 2"),
        (torchrun(RANK="one"), "MRL-1602 RANK='one' is not a number"),
        (torchrun(MASTER_PORT="70000"), "MRL-1602 MASTER_PORT=70000 is not a port"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "MRL-1601 LOCAL_WORLD_SIZE is not set"),
        (slurm(SLURM_STEP_NUM_TASKS="5"), "MRL-1603 Slurm says 5 tasks, and 2(x2) per node"),
        (slurm(SLURM_STEP_NODELIST="node[7-"), "MRL-1604"),
        ({HANDED_OVER: "{}"}, f"MRL-1602 {HANDED_OVER} is not a rank's record"),
        (hand_over(local_record(0, 2, 29500, 3)) | {"RANK": "1"}, "MRL-1603 megarl made this process RANK=0"),
    ],
)  # fmt: skip
def test_contradictions_are_named(environment: dict[str, str], message: str) -> None:
    assert message in refused(environment)


def test_a_record_of_another_shape_is_refused() -> None:
    tree = asdict(local_record(0, 2, 29500, 3)) | {"rank": "0"}
    assert "MRL-1602" in refused({HANDED_OVER: json.dumps(tree)})


def test_the_layout_must_have_a_place_for_every_rank() -> None:
    settings = ["run.num_ranks=16", "actor.parallel.tp_size=2", "actor.parallel.pp_size=2"]
    config = load_config(QUICKSTART, settings)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8 \(torchrun\).* needs 16: tp 2 x pp 2 x dp 4\.") as caught:
        read_rendezvous(torchrun(per_node=4), config)
    assert caught.value.code == "MRL-1110"
    assert read_rendezvous(torchrun(per_node=8), config) is not None


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    config = load_config(QUICKSTART, ["run.num_ranks=4"])
    for rank in range(4):  # all of them: any may be the one who tells
        with pytest.raises(ConfigError, match="shows it 1 GPUs"):
            read_rendezvous(torchrun(rank, CUDA_VISIBLE_DEVICES="0"), config)
    # Slurm may show each task only its own
    own = read_rendezvous(slurm(rank=1, CUDA_VISIBLE_DEVICES="5"), config)
    assert own is not None and own.device_index == 0
    on_cpu = load_config(QUICKSTART, ["run.num_ranks=4", "run.device=cpu"])
    assert read_rendezvous(torchrun(rank=1, CUDA_VISIBLE_DEVICES="0"), on_cpu) is not None


def test_one_rank_of_a_node_tells_a_mistake_that_all_of_them_find(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, is_told in ((2, True), (3, False)):  # the first and the second of the second node
        for name, value in torchrun(rank).items():
            monkeypatch.setenv(name, value)
        assert main(["train", "no_such.yaml"]) == 66
        assert ("MRL-4010" in capsys.readouterr().err) == is_told


# -- Slurm's lists


@pytest.mark.parametrize(
    ("expression", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu-[08-10,12],login", ["gpu-08", "gpu-09", "gpu-10", "gpu-12", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1]-x,b", ["a1-x", "b"]),
    ],
)
def test_host_lists(expression: str, hosts: list[str]) -> None:
    assert expand_hosts(expression) == hosts


@pytest.mark.parametrize("expression", ["", "a,", "n[", "n]1", "n[1-]", "n[3-1]", "n[1-9999999999]", "n[[1]]", "n[a]"])
def test_host_lists_that_are_none(expression: str) -> None:
    with pytest.raises(ConfigError, match="MRL-1604"):
        expand_hosts(expression)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1))
def test_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_tasks(text) == [count for count, times in runs for _ in range(times)]


# -- the network


def test_one_node_keeps_to_itself() -> None:
    record = local_record(0, 2, 29500, 3)
    assert choose_interface(record, {}) == "lo"
    assert choose_interface(record, {"GLOO_SOCKET_IFNAME": "eth7"}) is None


def test_several_nodes_use_the_interface_that_leads_to_the_first() -> None:
    record = replace(local_record(0, 2, 29500, 3), num_nodes=2)
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and psutil.net_if_stats()[name].isup:
                assert choose_interface(replace(record, master_address=one.address), {}) == name
                assert choose_interface(record, {"NCCL_SOCKET_IFNAME": name}) == name
    assert interface_of(own_address("localhost")) == "lo"


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="does not know a host 'no-such-host"):
        own_address("no-such-host.invalid")


# -- meeting


def meet(rank: int, size: int, meeting: str, seconds: float) -> MegarlError | None:
    from megarl.models import rendezvous

    own = rendezvous.Rendezvous(rank, size, rank, meeting, join_timeout=timedelta(seconds=seconds))
    try:
        rendezvous.Meeting(own).call_the_roll()
    except MegarlError as error:
        return error
    return None


def test_who_does_not_come_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results: list[MegarlError | None] = [None, None]

    def come(rank: int) -> None:
        results[rank] = meet(rank, 4, f"tcp://127.0.0.1:{port}", 5)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host = socket.gethostname()
    for error in results:
        assert isinstance(error, EngineError) and error.code == "MRL-5304"
        assert f"of 4 ranks 2 did not come within 5 s: rank 2, 3. Those here are on {host}." in str(error)


def test_nobody_at_the_meeting_is_told_without_a_page_of_torchs_stack(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    error = meet(1, 2, f"tcp://127.0.0.1:{port}", 1)
    assert error is not None and error.code == "MRL-5303"
    assert f"finds nobody at 127.0.0.1:{port}: [Errno 111] Connection refused" in str(error)
    assert capfd.readouterr().err == ""


def test_a_meeting_that_is_gone_is_told() -> None:
    from megarl.models.rendezvous import Meeting, Rendezvous

    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        first = Meeting(Rendezvous(0, 3, 0, f"inherited://{place}/{os.dup(listener.fileno())}"))
    second = Meeting(Rendezvous(1, 3, 1, f"tcp://{place}"))
    threading.Timer(0.2, lambda: setattr(first, "_store", None)).start()
    with pytest.raises(EngineError, match=f"MRL-5302 rank 1 on .* lost the others .* nobody is at {place} any more"):
        second.call_the_roll()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = meet(0, 2, f"tcp://127.0.0.1:{taken.getsockname()[1]}", 5)
    assert error is not None and "cannot listen at 127.0.0.1" in str(error)
    assert error.code == "MRL-5303"

"""``megarl doctor``: what is not well is said with what to do, and by exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cli import main
from megarl.config.load import load_config
from megarl.launch.doctor.finding import Finding, as_table, merge, worst
from megarl.launch.doctor.variables import Surroundings, check_variables
from tests.e2e.runs import ROOT, environment
from tests.unit.config_files import QUICKSTART

TWO_NODES = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
INTERFACES = ("lo", "eth0", "ib0")


def texts(variables: dict[str, str], *overrides: str) -> str:
    config = load_config(QUICKSTART, overrides)
    found = check_variables(variables, config, Surroundings(INTERFACES, 8, road="eth0"))
    return "\n".join(f"{one.level}: {one.text} -> {one.remedy}" for one in found)


@pytest.mark.parametrize(
    ("variables", "overrides", "level", "hint"),
    [
        ({}, (), "ok", "no variables"),
        ({"RANK": "1"}, (), "error", "WORLD_SIZE is not set"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("run.device=cuda",), "error", "unset CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": ""}, (), "ok", "no variables"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, (), "ok", "CUDA_VISIBLE_DEVICES=-1 hides all GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ("run.device=cuda",), "error", "unset CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "garbage"}, (), "warning", "hides all GPUs, because 'garbage' is no device"),
        ({"CUDA_VISIBLE_DEVICES": "0,GPU-1a,x,2"}, (), "warning", "ends at 'x', which is no device: 2 can be seen"),
        ({"CUDA_VISIBLE_DEVICES": "garbage"}, ("run.device=cpu",), "ok", "no variables"),
        ({"SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}, (), "warning", "a Slurm job with 2 nodes, but without srun"),
        ({"SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}, (), "ok", "no variables"),
        ({**TWO_NODES, "GLOO_SOCKET_IFNAME": "lo"}, (), "error", "2 nodes, and loopback does not leave this one"),
        ({**TWO_NODES, "NCCL_SOCKET_IFNAME": "lo"}, (), "error", "2 nodes, and loopback does not leave this one"),
        ({**TWO_NODES, "GLOO_SOCKET_IFNAME": "eth0"}, (), "ok", "no variables"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, (), "error", "eth0"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, (), "ok", "no variables"),  # NCCL takes a prefix
        ({"NCCL_SOCKET_IFNAME": "^docker"}, (), "ok", "no variables"),
        ({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}, (), "warning", "different networks"),
        ({"OMP_NUM_THREADS": "many"}, (), "error", "not a number"),
        ({"OMP_NUM_THREADS": "8", "LOCAL_WORLD_SIZE": "4"}, (), "warning", "set OMP_NUM_THREADS=2"),
        ({"http_proxy": "http://proxy:3128"}, (), "warning", "no_proxy=127.0.0.1"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,10.0.0.1"}, (), "ok", "no variables"),
        ({"MEGARL_FAULT": "step/end=kill"}, (), "warning", "unset MEGARL_FAULT"),
    ],
)
def test_conflicting_variables(variables: dict[str, str], overrides: tuple[str, ...], level: str, hint: str) -> None:
    found = texts(variables, *overrides)
    assert found.startswith(f"{level}: ")
    assert hint in found


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y"]), st.sampled_from(["ok", "error"]))))
def test_findings_of_many_ranks_are_told_once_each(rows: list[tuple[str, str, str]]) -> None:
    by_rank = [(host, [Finding(name, level, "text")]) for host, name, level in rows]  # type: ignore[arg-type]
    merged = merge(by_rank)
    assert len({one.finding for one in merged}) == len(merged) == len({row[1:] for row in rows})
    assert (worst(merged) == "error") == any(level == "error" for _, _, level in rows)
    assert len(as_table(merged, 2).splitlines()) == len(merged)


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in tree["findings"]} >= {"versions", "device", "memory", "/dev/shm", "open files"}
    assert all(row["hosts"] == [socket.gethostname()] for row in tree["findings"])
    assert main(["doctor", str(QUICKSTART), "run.dir=/proc"]) == 69
    captured = capsys.readouterr()
    assert "error    run directory      /proc cannot be written" in captured.out
    assert captured.err.startswith("MRL-5305 not ready to train: run directory.")


@pytest.mark.slow
def test_all_ranks_of_a_launcher(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    told = subprocess.run(
        [*launcher, "-m", "megarl", "doctor", str(QUICKSTART), f"run.dir={tmp_path}/runs", "--json"],
        capture_output=True,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
        cwd=ROOT,
        check=False,
        timeout=240,
    )
    assert told.returncode == 0, told.stderr
    tree = json.loads(told.stdout)
    assert tree["checked"] == "2 ranks on 1 node (torchrun)"
    by_name = {row["name"]: row for row in tree["findings"]}
    assert by_name["interface"]["text"] == "lo"
    assert "all 2 ranks reach each other" in by_name["network"]["text"]
    assert by_name["clocks"]["level"] == by_name["shared disk"]["level"] == "ok"
    assert list((tmp_path / "runs").iterdir()) == []

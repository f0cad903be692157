"""tools/slurm/ray.sbatch with commands of the test's: what the shell makes of addresses, warnings and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Ray runs what is submitted to it, tells it to stop, and says only that it did.
RAY = """
case "$1 $2" in
"job submit")
    while [ "$1" != -- ]; do shift; done
    shift
    "$@" &
    echo $! >job
    wait $!
    code=$?
    [ ! -e stopped ] || exit 0
    exit $((code > 0))
    ;;
"job stop")
    : >stopped
    pkill -TERM -P "$(<job)"
    kill -TERM "$(<job)"
    ;;
esac
"""
SAVES = "trap 'sleep 0.2; exit {code}' TERM; echo ready; while :; do sleep 0.05; done"


def start(tmp_path: Path, *, megarl: str, num_nodes: int = 2, address: str = "10.0.0.1") -> subprocess.Popen[str]:
    commands = {
        "ray": RAY,
        "megarl": megarl,
        "srun": "exec sleep 600",
        "scontrol": '[ "$1" = show ] && echo n1 || echo "scontrol $*"',
        "getent": f"echo {address} STREAM n1",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "config.yaml").touch()
    own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": str(num_nodes)}
    return subprocess.Popen(
        ["bash", str(ROOT / "tools" / "slurm" / "ray.sbatch"), "config.yaml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_ON_NODE": "2", **own},
    )


def warned(tmp_path: Path, megarl: str) -> tuple[int, str]:
    process = start(tmp_path, megarl=megarl)
    assert process.stdout is not None
    said = process.stdout.readline()
    while "ready" not in said:
        assert process.poll() is None, said
        said += process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    said += process.communicate(timeout=60)[0]
    assert list(tmp_path.glob(".megarl-ray-*")) == [], "the token is gone"
    return process.returncode, said


@pytest.mark.parametrize(("code", "is_requeued"), [(75, True), (0, False), (65, False)])
def test_a_warned_run_is_requeued_if_it_was_saved_and_not_if_it_finished(
    code: int, is_requeued: bool, tmp_path: Path
) -> None:
    returned, said = warned(tmp_path, SAVES.format(code=code))
    assert returned == code, said
    assert ("scontrol requeue 7" in said) is is_requeued


@pytest.mark.parametrize(
    "megarl",
    [SAVES.format(code=76), "echo ready; exec sleep 600", SAVES.format(code=15)],
    ids=["it says so", "it does not listen yet", "Ray answers"],
)
def test_a_warned_run_without_a_step_ends_the_job(megarl: str, tmp_path: Path) -> None:
    returned, said = warned(tmp_path, megarl)
    assert returned == 76, said
    assert "requeue" not in said
    assert said.splitlines()[-1].startswith("job 7 ends: no step was finished since restart 0: raise --time")


@pytest.mark.parametrize("code", [0, 64, 75, 137])
def test_without_a_warning_the_exit_code_is_the_jobs(code: int, tmp_path: Path) -> None:
    process = start(tmp_path, megarl=f"exit {code}")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == code, said
    assert "requeue" not in said


@pytest.mark.parametrize(
    ("num_nodes", "address", "is_taken"),
    [(1, "127.0.1.1", True), (2, "127.0.1.1", False), (2, "172.16.3.4", True), (1, "8.8.8.8", False)],
)
def test_others_must_reach_the_first_node_and_strangers_must_not(
    num_nodes: int, address: str, is_taken: bool, tmp_path: Path
) -> None:
    process = start(tmp_path, megarl="exit 0", num_nodes=num_nodes, address=address)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == (0 if is_taken else 64), said
    assert (f"n1 has the address '{address}'" in said and "Set MEGARL_HEAD_ADDRESS" in said) is not is_taken

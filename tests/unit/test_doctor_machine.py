"""``megarl doctor`` on one machine: limits of made-up control groups, made-up GPUs, and run directories that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.launch.doctor.compare import Report, compare
from megarl.launch.doctor.devices import Devices, check_devices, look_at_devices
from megarl.launch.doctor.finding import Finding
from megarl.launch.doctor.limits import MemoryLimit, core_limit, memory_limit, num_usable_cores
from megarl.launch.doctor.machine import check_machine
from tests.e2e.runs import ROOT, environment
from tests.unit.config_files import QUICKSTART

H100 = "NVIDIA H100"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_limits_of_slurm_are_above_the_own_group_version_2(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    files = {
        "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        f"{job}/memory.max": str(8 << 30),
        f"{job}/memory.current": str(3 << 30),
        f"{job}/memory.stat": f"anon 5\ninactive_file {1 << 30}\nactive_file 7",
        f"{job}/step_0/memory.max": "max",
        f"{job}/step_0/user/task_0/memory.max": str(16 << 30),
        f"{job}/step_0/user/task_0/memory.current": str(1 << 30),
        f"{job}/cpu.max": "250000 100000",
        f"{job}/step_0/cpu.max": "max 100000",
    }
    write(tmp_path, files)
    # what was read from files does not count: it goes when somebody needs the memory
    assert memory_limit(tmp_path) == MemoryLimit(8 << 30, 6 << 30)
    assert core_limit(tmp_path) == 2.5
    assert num_usable_cores(tmp_path) == min(2, len(os.sched_getaffinity(0)))


def test_limits_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/slurm/uid_0/job_7\n3:cpu,cpuacct:/slurm/job_7\n0::/",
        "sys/fs/cgroup/memory/slurm/uid_0/memory.limit_in_bytes": str(4 << 30),
        "sys/fs/cgroup/memory/slurm/uid_0/memory.usage_in_bytes": str(3 << 30),
        "sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    write(tmp_path, files)
    assert memory_limit(tmp_path) == MemoryLimit(4 << 30, 1 << 30)
    assert core_limit(tmp_path) == 0.5
    assert num_usable_cores(tmp_path) == 1


@pytest.mark.parametrize("path", ["0::/docker/of/the/host", "0::/../../elsewhere", "", "nonsense"])
def test_limits_of_a_container_are_at_its_root(path: str, tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": path, "sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "1"})
    assert memory_limit(tmp_path) == (MemoryLimit(1000, 999) if path.startswith("0:") else None)


def devices(seen: Devices, index: int = 0, *overrides: str) -> dict[str, Finding]:
    found = list(check_devices(seen, load_config(QUICKSTART, overrides), index, 8))
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def test_a_task_that_sees_only_its_own_gpu_is_well() -> None:
    """As of ``srun --gpus-per-task=1``: whichever local rank it is, its device is the first."""
    one = Devices("2.13.0", "13.0", "2.28.9", (H100,), ("GPU-a",), "580.65.06", True)
    found = devices(one, 0, "run.device=cuda")
    assert found["device"] == Finding("device", "ok", f"1 x {H100}")
    assert found["GPU driver"].text == "580.65.06"
    assert found["CUDA"].text == "torch 2.13.0 with CUDA 13.0"
    assert found["NCCL"].text == "2.28.9"
    assert found["Transformer Engine"].level == "warning"
    assert devices(one, 1, "run.device=cuda")["device"].level == "error"


def test_ranks_that_share_a_gpu_and_differ_are_named() -> None:
    def report(node: int, gpu: str, torch: str, steps: str) -> Report:
        return Report(f"h, node {node}", [], {"torch": torch, "megarl": "1"}, {"run.num_steps": steps, "a": "1"}, gpu)

    reports = {
        0: report(0, "GPU-a", "2.13", "3"),
        1: report(0, "GPU-a", "2.13", "3"),
        2: report(1, "GPU-a", "2.12", "3"),
        3: report(1, "GPU-b", "2.12", "4"),
    }
    software, settings, shared = compare(reports)
    assert (software.level, software.text) == ("error", "torch is 2.13 on ranks 0-1, 2.12 on ranks 2-3")
    assert (settings.level, settings.text) == ("error", "run.num_steps is 3 on ranks 0-2, 4 on rank 3")
    assert (shared.level, shared.text) == ("error", "ranks 0-1 share one GPU (GPU-a, h, node 0)")
    assert [one.level for one in compare({0: reports[0]})] == ["ok", "ok"]


@pytest.mark.parametrize(("device", "level"), [("auto", "warning"), ("cuda", "error"), ("cpu", "ok")])
def test_a_torch_without_cuda_beside_gpus(device: str, level: str, tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
    write(tmp_path, {"proc/driver/nvidia/version": version})
    seen = look_at_devices(tmp_path)
    if seen.cuda is not None:
        pytest.skip("this torch is a build with CUDA")
    found = devices(seen, 0, f"run.device={device}")
    assert found["GPU driver"].text == "580.65.06"
    assert found["device"].level == level
    if level != "ok":
        assert "NVIDIA GPUs (driver 580.65.06), but torch" in found["device"].text
        assert "without CUDA" in found["device"].text


def test_sglang_is_looked_for_where_the_run_would(tmp_path: Path) -> None:
    cpu = Devices("2.13.0")
    own = ("generation.engine=sglang", "generation.python=")
    lacking = devices(cpu, 0, own[0], f"{own[1]}{sys.executable}")["SGLang"]
    assert (lacking.level, lacking.text) == ("error", f"not installed for generation.python={sys.executable}")
    assert "generation.python" not in lacking.remedy
    absent = devices(cpu, 0, own[0], f"{own[1]}{tmp_path}/python")["SGLang"]
    assert (absent.level, "cannot be run: No such file" in absent.text) == ("error", True)
    # an interpreter of its own, with a package of that name
    write(tmp_path, {"site/sglang-0.5.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9"})
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert devices(cpu, 0, own[0], f"{own[1]}{python}")["SGLang"] == Finding("SGLang", "ok", f"0.5.9, of {python}")
    assert devices(cpu, 0)["SGLang"].level == "ok"
    here = devices(cpu, 0, own[0])["SGLang"]
    assert here.level == "error" or "not installed" not in here.text


def test_a_file_in_place_of_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    for below in ("afile", "afile/x", "afile/x/y"):
        config = load_config(QUICKSTART, [f"run.dir={tmp_path}/{below}"])
        found = next(one for one in check_machine(config) if one.name == "run directory")
        assert found.level == "error"
        assert f"a file is in its place ({tmp_path}/afile)" in found.text


def test_a_run_directory_that_may_not_be_entered(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody without rights")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    program = (
        "from megarl.launch.doctor.machine import _storage\n"
        "from megarl.config.load import load_config\n"
        "import os, sys\n"
        f"config = load_config({str(QUICKSTART)!r}, ['run.dir={locked}/runs'])\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "found = _storage(config)\n"
        "sys.stdout.write(f'{found.level} {found.text}')\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), cwd=ROOT, check=False
    )
    assert told.stdout == f"error {locked}/runs cannot be written: Permission denied", told.stderr

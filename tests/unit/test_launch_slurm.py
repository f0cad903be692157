"""``megarl launch slurm``: what the sbatch file says, and what is refused before there is one."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli import main
from megarl.config.load import load_config
from megarl.core.errors import ConfigError
from megarl.launch.slurm import SlurmRequest, render

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
CONFIG = load_config(QUICKSTART, [])


def rendered(*words: str, nodes: int = 2, time: str = "24:00:00", save_before: int = 300) -> str:
    request = SlurmRequest(nodes, None, time, save_before, None)
    return render(load_config(QUICKSTART, words), request, QUICKSTART, words)[0]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "slurm", str(QUICKSTART), *words]) == 64
    return capsys.readouterr().err


def test_the_file_in_tools_is_what_the_command_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "train.sbatch"
    assert main(["launch", "slurm", "configs/quickstart.yaml", "--nodes", "2", "--out", str(path)]) == 0
    assert path.read_text() == (ROOT / "tools" / "slurm" / "train.sbatch").read_text()


def test_the_layout_is_checked_with_its_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--nodes", "4", "--ranks-per-node", "8", "run.num_ranks=16", "actor.parallel.tp_size=2")
    assert text.startswith("MRL-1650 4 nodes x 8 ranks per node = 32 ranks, but quickstart has 16: tp 2 x pp 1 x dp 8.")
    assert "run.num_ranks=32" in text
    text = told(capsys, "--nodes", "3", "run.num_ranks=16", "actor.parallel.tp_size=2")
    assert "16 / 3 = 5.33" in text
    assert "1, 2, 4, 8, 16, or add run.num_ranks=18" in text
    assert "MRL-1650 --nodes 0 cannot be" in told(capsys, "--nodes", "0")
    assert "MRL-1650 --nodes 2 --ranks-per-node 0 cannot be" in told(capsys, "--nodes", "2", "--ranks-per-node", "0")


@settings(deadline=None)  # the first one loads modules
@given(st.integers(1, 64), st.integers(1, 64))
def test_nodes_times_ranks_per_node_are_the_ranks(num_ranks: int, nodes: int) -> None:
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"num_ranks": num_ranks})})
    request = SlurmRequest(nodes, None, "24:00:00", 300, None)
    if num_ranks % nodes:
        with pytest.raises(ConfigError, match="MRL-1650"):
            render(config, request, QUICKSTART, [])
    else:
        assert f"--ntasks-per-node={num_ranks // nodes}\n" in render(config, request, QUICKSTART, [])[0]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("12:00:00", 43200), ("1-0", 86400), ("0-12:30", 45000), ("0-0:10:01", 601)],
)
def test_time_limits_are_read_as_slurm_does(time: str, seconds: int) -> None:
    latest = min(seconds - 60, 65_535)  # behind --signal Slurm takes no more
    assert f"USR1@{latest}\n" in rendered(time=time, save_before=latest)
    with pytest.raises(ConfigError, match="MRL-1651"):
        rendered(time=time, save_before=latest + 1)


def test_what_slurm_would_refuse_or_take_for_no_limit_is_refused() -> None:
    assert "USR1@65535\n" in rendered(save_before=65_535)
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        rendered(save_before=65_536)
    with pytest.raises(ConfigError, match="MRL-1651 --time 0:00 means no limit"):
        rendered(time="0:00")
    with pytest.raises(ConfigError, match="MRL-1651 --time 1 = 60 seconds is too short"):
        rendered(time="1", save_before=1)


@pytest.mark.parametrize("time", ["", "soon", "1:2:3:4", "-5", "1-", "5\n#SBATCH --uid=0"])
def test_other_time_limits_are_refused(time: str) -> None:
    with pytest.raises(ConfigError, match="MRL-1651"):
        rendered(time=time)


def test_a_partition_cannot_bring_in_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "MRL-1652" in told(capsys, "--nodes", "2", "--partition", "gpu\n#SBATCH --uid=0")


def test_settings_reach_megarl_as_they_were_written() -> None:
    setting = "data.train.path=/data/it's $HOME `here`.jsonl"
    request = SlurmRequest(2, None, "24:00:00", 300, None)
    script, _ = render(CONFIG, request, Path("my configs/a.yaml"), [setting])
    line = next(line for line in script.splitlines() if "-m megarl train" in line)
    words = shlex.split(line.replace('"$@" &', ""))
    assert words[-2:] == ["my configs/a.yaml", setting]


def test_gpus_are_asked_for_where_the_run_needs_them() -> None:
    ranks = "run.num_ranks=8"
    assert "\n#SBATCH --gpus-per-node=4\n" in rendered("run.device=cuda", ranks)
    assert "\n##SBATCH --gpus-per-node=4\n" in rendered("run.device=auto", ranks)
    assert "gpus-per-node" not in rendered("run.device=cpu", ranks)


def test_separate_servers_get_gpus_of_their_own() -> None:
    words = ("run.num_ranks=4", "run.device=cuda", "generation.engine=sglang", "generation.colocated=false")
    assert "--gpus-per-node=6\n" in rendered(*words, "generation.num_servers=2", nodes=1)
    # servers are shared out among the nodes, and may have several GPUs each
    assert "--gpus-per-node=6\n" in rendered(*words, "generation.num_servers=3", "generation.tp_size=2")
    assert "--gpus-per-node=2\n" in rendered(*words[:3])


def test_cores_and_memory_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n##SBATCH --cpus-per-task=8\n##SBATCH --mem=0\n##SBATCH --exclusive\n" in rendered()
    assert main(["launch", "slurm", str(QUICKSTART), "--nodes", "2", "--cpus-per-rank", "12"]) == 0
    assert "\n#SBATCH --cpus-per-task=12\n" in capsys.readouterr().out
    assert "MRL-1650 --cpus-per-rank 0 cannot be" in told(capsys, "--nodes", "2", "--cpus-per-rank", "0")


def test_nodes_for_rewards_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", str(QUICKSTART), "--nodes", "2", "launch.reward_nodes=2"]) == 0
    assert capsys.readouterr().err.startswith("warning: launch.reward_nodes=2 is for `megarl launch ray` only")


def test_nodes_for_rewards_are_warned_of_by_megarl_train_as_well(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before anything else; the data is bad so that it ends there."""
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    words = [f"run.dir={tmp_path}", f"data.train={tmp_path / 'bad.jsonl'}", "launch.reward_nodes=2"]
    assert main(["train", str(QUICKSTART), *words]) == 65
    assert capsys.readouterr().err.startswith("warning: launch.reward_nodes=2 is for `megarl launch ray` only")


def test_the_doctors_job_has_as_many_tasks_as_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2", "--doctor", "--partition", "gpu", "run.num_ranks=8"]
    assert main(["launch", "slurm", str(QUICKSTART), *words]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --ntasks-per-node=4\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert "-m megarl doctor " in script
    assert "requeue" not in script
    assert "--signal" not in script
    assert "MRL-1650" in told(capsys, "--nodes", "3", "--doctor")
    assert "MRL-1651" in told(capsys, "--nodes", "2", "--doctor", "--time", "soon")


def test_tensor_parallel_groups_across_nodes_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run.num_ranks=6", "actor.parallel.tp_size=2"]
    assert main(["launch", "slurm", str(QUICKSTART), "--nodes", "2", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: tensor-parallel groups of 2 ranks span nodes of 3 ranks")
    assert captured.out.startswith("#!/bin/bash\n")


def test_a_file_that_was_edited_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    for _ in range(2):
        assert main(["launch", "slurm", str(QUICKSTART), "--nodes", "2", "--out", str(path)]) == 0
    path.write_text("mine")
    assert "MRL-1653" in told(capsys, "--nodes", "2", "--out", str(path))
    assert path.read_text() == "mine"
    assert "MRL-1653" in told(capsys, "--nodes", "2", "--out", str(tmp_path / "no" / "job.sbatch"))


def test_without_slurm_nothing_is_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "MRL-1654" in told(capsys, "--nodes", "2", "--submit")
    refuses = tmp_path / "sbatch"
    refuses.write_text("#!/bin/sh\necho 'sbatch: error: Invalid partition' >&2\nexit 1\n")
    refuses.chmod(refuses.stat().st_mode | stat.S_IXUSR)
    text = told(capsys, "--nodes", "2", "--submit")
    assert text.startswith("MRL-1655 sbatch did not take the job: sbatch: error: Invalid partition")


SRUN = """#!/bin/bash
{body}
"""


def run_script(tmp_path: Path, srun: str, *, warn: bool) -> tuple[int, str]:
    """The rendered script with an srun of the test's: what the shell makes of exit codes and warnings."""
    for name, body in {"srun": srun, "scontrol": 'echo "scontrol $*"'}.items():
        (tmp_path / name).write_text(SRUN.format(body=body))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job").write_text(rendered())
    process = subprocess.Popen(
        ["bash", str(tmp_path / "job")],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"},
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if warn:
        said += process.stdout.readline()  # srun listens
        process.send_signal(10)
    said += process.communicate(timeout=60)[0]
    return process.returncode, said


SAVES = "trap 'sleep 0.2; exit {code}' USR1; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize(("code", "is_requeued"), [(75, True), (70, False), (0, False)])
def test_a_warned_job_is_requeued_if_it_was_saved(code: int, is_requeued: bool, tmp_path: Path) -> None:
    returned, said = run_script(tmp_path, SAVES.format(code=code), warn=True)
    assert returned == code, said
    assert ("scontrol requeue 7" in said) is is_requeued


@pytest.mark.parametrize("code", [76, 138])
def test_a_warned_job_without_a_step_ends(code: int, tmp_path: Path) -> None:
    """76: megarl says so; 138: it could not even listen. Another start would get no further."""
    returned, said = run_script(tmp_path, SAVES.format(code=code), warn=True)
    assert returned == 76, said
    assert "requeue" not in said
    assert said.splitlines()[-1].startswith("job 7 ends: no step was finished since restart 0: raise --time")


@pytest.mark.parametrize("code", [0, 69, 75, 137])
def test_without_a_warning_the_exit_code_is_the_jobs(code: int, tmp_path: Path) -> None:
    """75 too: somebody asked the ranks to stop, and wants them stopped."""
    returned, said = run_script(tmp_path, f"exit {code}", warn=False)
    assert returned == code
    assert "requeue" not in said
    assert said.startswith("job 7 on n1: restart 0 at ")

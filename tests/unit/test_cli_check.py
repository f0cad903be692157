"""The command as users meet it: a process, its exit code and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import __version__
from megarl.cli import main
from tests.unit.config_files import CONFIGS, MINIMAL, QUICKSTART


def megarl(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("quickstart*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configurations_are_valid(path: Path) -> None:
    done = megarl("check", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"{path.stem}: the configuration is valid.\n")


def test_a_configuration_whose_reward_does_not_work_is_not_called_valid(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    (tmp_path / "own.py").write_text("def score(prompt):\n    return 1.0\n")
    done = megarl("check", "run.yaml", "reward=own:score", cwd=tmp_path)
    assert (done.returncode, "MRL-1408" in done.stderr, "is valid" in done.stdout) == (64, True, False)


def test_check_prints_layout_size_batches_and_phases() -> None:
    text = megarl("check", QUICKSTART).stdout
    assert "410,368 parameters" in text
    assert "2 ranks = tp 1 x pp 1 x dp 2" in text
    assert "32 prompts x 8 = 256 samples" in text
    assert "minibatches 2 x epochs 1 = 2 per step, 80 in all" in text
    assert "actor_train/train_step" in text
    assert "critic/" not in text


MISTAKES = [
    ("num_steps: 10", "num_steps: ten", 3, 'run.num_steps="ten"'),
    ("num_steps: 10", "num_stesp: 10", 3, "Did you mean run.num_steps?"),
    ("num_steps: 10", "num_steps: 1e3", 3, "Write num_steps: 1000"),
    ("num_steps: 10", "num_steps: 10\n  num_steps: 20", 3, "run.yaml:3 and :4 both set run.num_steps (10, then 20)."),
    ("num_steps: 10", "num_steps: 10\n  sead: 1", 4, "Did you mean run.seed?"),
    ("num_steps: 10", "num_steps: 10\n  device: gpu", 4, "one of auto, cpu, cuda"),
    ("name: small", "name: s m", 2, "letters, digits"),
    ("model:", "modle:", 4, "Did you mean model?"),
    ("builtin:characters", "builtin:character", 5, "Did you mean builtin:characters?"),
    ("[Qwen3ForCausalLM]", "[Qwen9]", 6, "MRL-1201"),
    ("num_key_value_heads: 2", "num_key_value_heads: 3", 6, "MRL-1206"),
    ("name: grpo", "name: grop", 16, "Did you mean grpo?"),
    ("name: grpo", "name: grpo\n  cliplow: 0.1", 17, "Did you mean algorithm.clip_low?"),
    ("name: grpo", "name: grpo\n  learning_rate: 1e-6", 17, "Did you mean actor.optimizer.lr?"),
    ("name: grpo", "name: grpo\n  kl: {coef: -1}", 17, "algorithm.kl.coef=-1"),
    ("name: grpo", "name: grpo\n\tclip_low: 0.1", 17, "Indent with spaces"),
    ("name: grpo", "name: !!python/name:os.system", 16, "uses the YAML tag"),
    ("max_new_tokens: 44", "max_new_tokens: 44\n  group_size: 1", 19, "too small for grpo"),
    ("max_new_tokens: 44", "max_new_tokens: 128", 18, "max_position_embeddings=128"),
    ("max_new_tokens: 44", "max_new_tokens: 44\n  temperature: 0", 19, "a number > 0 and <= 100"),
    ("max_new_tokens: 44", "max_new_tokens: 44\n  top_p: 1.5", 19, "a number > 0 and <= 1"),
    ("data:\n", "actor: {parallel: {tp_size: 3}}\ndata:\n", 19, "4 heads / 3 and 2 kv heads / 3 are not whole."),
    ("data:\n", "actor: {parallel: {pp_size: 3}}\ndata:\n", 19, "2 layers / 3 is not whole."),
    ("data:\n", "reward: coinflip\ndata:\n", 19, "Did you mean coin_flip?"),
    ("train: builtin:carry", "trian: builtin:carry", 20, "Did you mean data.train?"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "words"), MISTAKES, ids=[new.strip()[-30:] for _, new, _, _ in MISTAKES]
)
def test_a_mistake_ends_with_64_and_names_line_and_remedy(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    assert old in MINIMAL
    (tmp_path / "run.yaml").write_text(MINIMAL.replace(old, new), encoding="utf-8")
    done = megarl("check", "run.yaml", cwd=tmp_path)
    assert done.returncode == 64
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert f"run.yaml:{line} " in done.stderr, done.stderr
    assert words in done.stderr, done.stderr
    assert done.stderr.endswith("Nothing was started.\n")


def test_neither_torch_nor_numpy_is_imported() -> None:
    script = (
        "import json, sys; from megarl.cli import main; code = main(sys.argv[1:]); "
        "heavy = ('torch', 'numpy', 'megatron', 'tokenizers'); "
        "json.dump([code, [name for name in heavy if name in sys.modules]], sys.stderr)"
    )
    command = [sys.executable, "-c", script, "check", str(QUICKSTART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stderr) == [0, []]


# -- in this process


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megarl {__version__}\n"
    for arguments in (["--help"], ["check", "--help"], ["train", "--help"]):
        assert main(arguments) == 0
        assert "usage: megarl" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["chekc"], ["check"], ["check", "a.yaml", "--fast"], ["--fast"]])
def test_usage_errors_end_with_64(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("MRL-1011 ")
    assert "usage: megarl" in captured.err


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["data.train=absent.jsonl"], 66, 'MRL-4102 data.train="absent.jsonl"'),
        (["eval.sets.extra={data: absent.jsonl}"], 66, 'MRL-4102 eval.sets.extra.data="absent.jsonl"'),
        (["model.tokenizer=absent"], 66, 'MRL-4101 model.tokenizer="absent"'),
        (["model.config=null", "model.path=absent"], 66, "MRL-4001 model.path='absent'"),
        (["model.config=null", "model.path=absent", "run.seed=-1"], 64, "MRL-1004 command line run.seed=-1"),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_missing_inputs_end_with_66_before_anything_starts(
    command: str, overrides: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(QUICKSTART), *overrides]) == code
    assert capsys.readouterr().err.startswith(words)


def test_a_missing_configuration_ends_with_66(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "absent.yaml"]) == 66
    assert capsys.readouterr().err.startswith('MRL-4010 the configuration "absent.yaml" cannot be read')


def test_a_model_directory_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    arguments = ["check", str(QUICKSTART), "model.config=null", f"model.path={tmp_path}", "model.tokenizer=null"]
    assert main(arguments) == 66
    complaints = capsys.readouterr().err
    assert "MRL-4101 model.path=" in complaints
    assert "MRL-4002 model.path=" in complaints
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    assert main(arguments) == 0
    # 2 x 100 x 64 embeddings, 4 layers of 4 x 64 x 64 + 3 x 64 x 96 + 2 x 64, and the last norm
    assert f"{2 * 6400 + 4 * (16384 + 18432 + 128) + 64:,} parameters" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert main(arguments) == 64
    assert "MRL-1204" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet() -> None:
    script = f"{sys.executable} -m megarl check {QUICKSTART} | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""

"""What was trained leaves as a Hugging Face model: the same weights, the same logits, with all that belongs to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.run import export
from tests.distributed.tiny_models import tiny_model
from tests.e2e.runs import environment, train
from tests.e2e.test_hugging_face_model import byte_tokenizer

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message.role ~ ': ' ~ message.content }}<|end|>{% endfor %}assistant: "
TOKENS = torch.tensor([[3, 14, 15, 92, 6, 53]])


def trained(directory: Path, family: str, layout: str, lr: float) -> Path:
    """One supervised step on a tiny model; the run's directory."""
    tiny_model(family, tied=family == "llama", directory=directory / "model", vocab_size=257)
    byte_tokenizer(directory / "model")
    (directory / "model" / "generation_config.json").write_text('{"eos_token_id": 256, "temperature": 0.25}')
    (directory / "chat.jinja").write_text(TEMPLATE)
    (directory / "train.jsonl").write_text('{"prompt": "Say 7: ", "demonstration": "7"}\n' * 8)
    config = {
        "run": {"name": "run", "num_steps": 1, "num_ranks": 2},
        "model": {"path": "model"},
        "actor": {"parallel": {layout: 2}, "optimizer": {"lr": lr}},
        "algorithm": {"name": "sft", "batch_size": 4},
        "data": {"train": "train.jsonl"},
        "chat": {"template": "chat.jinja"},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    outcome = train(path, directory, "run.name=run")
    assert outcome.code == 0, outcome.stderr
    return outcome.directory


def megarl_export(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "megarl", "export", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=environment(), check=False, timeout=300)


def logits(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory)(TOKENS).logits


@pytest.mark.parametrize(("family", "layout"), [("llama", "tp_size"), ("qwen3", "pp_size")])
def test_weights_come_out_as_they_went_in(family: str, layout: str, tmp_path: Path) -> None:
    """A learning rate of 0: the optimizer steps, and every weight keeps its bits."""
    run = trained(tmp_path, family, layout, lr=0.0)
    result = megarl_export(tmp_path, str(run), "--out", "out/model")
    assert result.returncode == 0, result.stderr
    assert "Step 1 of" in result.stdout
    assert result.stderr == ""
    source, out = tmp_path / "model", tmp_path / "out" / "model"
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(out), logits(source))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE, "the run's, which is not the tokenizer's"
    assert (
        AutoTokenizer.from_pretrained(out)("Say 7").input_ids
        == AutoTokenizer.from_pretrained(source)("Say 7").input_ids
    )


def test_a_large_model_is_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, "qwen3", "tp_size", lr=1e-2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "_MAX_FILE_BYTES", 40_000)
    export.export_checkpoint(run, 1, tmp_path / "cut")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    export.export_checkpoint(run, None, tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert torch.equal(logits(tmp_path / "cut"), logits(tmp_path / "whole"))
    assert not torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "model")), "it was trained"
    # -- what is refused
    refused = {
        (str(run), "--step", "7", "--out", "new"): (66, "There are: 1"),
        ("nowhere", "--out", "new"): (66, "MRL-4301"),
        (str(run), "--out", "whole"): (64, "MRL-1503"),
    }
    for arguments, (code, told) in refused.items():
        result = megarl_export(tmp_path, *arguments)
        assert (result.returncode, told in result.stderr) == (code, True), result.stderr
    shard = run / "checkpoints" / "step_000001" / "rank_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    damaged = megarl_export(tmp_path, str(run), "--out", "new")
    assert damaged.returncode == 74
    assert "rank_00000.safetensors" in damaged.stderr
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.glob(".new*")] == []

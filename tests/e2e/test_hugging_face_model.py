"""A run from a local Hugging Face directory, with its own tokenizer, JSONL data and a user's reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.distributed.tiny_models import tiny_model
from tests.e2e.runs import train

pytestmark = pytest.mark.slow

REWARD = """
from megarl.rewards import Reward

async def more_sevens(prompt, sample, bonus=0.0):
    share = sample.response.count("7") / max(1, len(sample.response))
    return Reward(share + bonus, {"length": len(sample.response), "right": float(prompt.answer == "7")})
"""


def byte_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with a chat token, as real models have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


@pytest.mark.parametrize(("family", "tied", "layout"), [("llama", True, "pp_size"), ("qwen2", False, "tp_size")])
def test_ppo_on_a_local_model(family: str, tied: bool, layout: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_model(family, tied=tied, directory=model, vocab_size=257)
    byte_tokenizer(model)
    (tmp_path / "my_reward.py").write_text(REWARD)
    rows = [{"prompt": f"Say {n} — ‘{'x' * n}’ <|end|>", "answer": n} for n in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "local", "num_steps": 3, "num_ranks": 2},
        "model": {"path": "model"},
        "actor": {"parallel": {layout: 2}, "optimizer": {"lr": 1e-3}},
        "critic": {"optimizer": {"lr": 1e-3}},
        "algorithm": {"name": "ppo", "num_minibatches": 2, "num_epochs": 2, "kl": {"coef": 0.01, "apply_to": "reward"}},
        "rollout": {
            "prompts_per_step": 3, "group_size": 2, "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 40,
        },
        "generation": {"num_slots": 4},
        "data": {"train": "train.jsonl"},
        "reward": {"name": "my_reward:more_sevens", "options": {"bonus": 0.5}},
        "eval": {"every": 2, "sets": {"openai/gsm8k": {"data": "train.jsonl", "num_samples": 4, "temperature": 1.0}}},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    outcome = train(path, tmp_path, "run.name=local")
    assert outcome.code == 0, outcome.stderr
    records = [json.loads(line)["metrics"] for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["training/epoch"] for record in records] == [0, 0, 0, 1]  # 3, 6, then 9 of 8 prompts
    last = records[-1]
    assert last["mismatch/logprob_gap_max"] < 1e-4
    assert last["critic/score/min"] >= 0.5
    assert last["rollout/length/mean"] > 0
    assert last["actor/kl_loss"] > 0
    assert last["eval/openai/gsm8k/score/best@4"] >= last["eval/openai/gsm8k/score/mean@4"]
    assert "val/test_score/openai/gsm8k:" in outcome.steps[-1]
    assert last["critic/grad_norm"] > 0
    assert records[1]["critic/rewards/mean"] <= records[1]["critic/score/mean"] + 1e-6

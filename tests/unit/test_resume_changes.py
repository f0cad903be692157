"""What may change when a run goes on, and what would make it another run: one row for each kind of setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError, DataError
from megarl.run.changes import require_same_run
from megarl.run.progress import Best, Progress, config_digest, data_hashes, template_digest

CONFIGS = Path(__file__).parents[2] / "configs"
SAFE = [
    "run.num_steps=99",
    "run.num_ranks=4",
    "run.device=cpu",
    "run.dir=elsewhere",
    "run.deterministic=true",
    "actor.parallel.tp_size=2",
    "actor.parallel.pp_size=2",
    "critic.parallel={tp_size: 2}",
    "actor.offload=false",
    "actor.recompute=full",
    "actor.overlap_grad_reduce=true",
    "actor.max_tokens_per_microbatch=8192",
    "actor.logprob_chunk_tokens=64",
    "actor.optimizer.lr=0.5",
    "actor.optimizer.schedule=cosine",
    "critic.optimizer.weight_decay=0.5",
    "algorithm.clip_high=0.5",
    "algorithm.kl.coef=0.5",
    "algorithm.kl.estimator=k1",
    "algorithm.num_epochs=3",
    "algorithm.critic_warmup_steps=7",
    "rollout.prompts_per_step=64",
    "rollout.max_new_tokens=20",
    "rollout.temperature=0.7",
    "generation.num_slots=8",
    "reward.options.after=x",
    "eval.every=3",
    "eval.sets.held_out.max_prompts=4",
    "checkpoint.every=3",
    "checkpoint.keep=7",
]
UNSAFE = [
    ("run.seed=1", "run.seed: was 0, is 1"),
    ("run.name=other", 'run.name: was "quickstart_ppo", is "other"'),
    ("model.config.num_hidden_layers=4", "model.config.num_hidden_layers: was 2, is 4"),
    ("model.config.rope_theta=5e5", "model.config.rope_theta: was 10000.0, is 500000.0"),
    ("model.dtype=bf16", 'model.dtype: was "auto", is "bf16"'),
    ("data.train=builtin:sort", 'data.train: was "builtin:carry", is "builtin:sort"'),
    ("data.shuffle=false", "data.shuffle: was true, is false"),
    ("warmup.num_steps=201", "warmup.num_steps: was 200, is 201"),
    ("warmup=null", "warmup: was "),
    ("algorithm.kl.coef=0", "algorithm.kl.coef: was 0.001, is 0.0"),
]


def load(*overrides: str) -> RunConfig:
    """PPO: it has every section."""
    return load_config(CONFIGS / "quickstart_ppo.yaml", overrides)


def progress(config: RunConfig, step: int = 7) -> Progress:
    tree = config.model_dump(mode="json")
    return Progress(
        step=step,
        served_version=step,
        cursors={},
        models={},
        num_samples=3.0,
        num_tokens=3.0,
        ledger_bytes=11,
        best=Best(4, 0.5),
        dtype="float32",
        config=tree,
        config_digest=config_digest(tree),
        template_digest=template_digest(config),
        data_hashes=data_hashes(config),
    )


@pytest.mark.parametrize("override", SAFE)
def test_a_safe_change_is_listed(override: str) -> None:
    key = override.partition("=")[0]
    listed = require_same_run(load(override), progress(load()))
    assert [line.partition(": was ")[0].startswith(key) for line in listed] == [True]
    assert require_same_run(load(override), progress(load(override))) == []


def refusal(config: RunConfig, before: Progress) -> str:
    with pytest.raises(ConfigError, match="MRL-1501") as refused:
        require_same_run(config, before)
    assert refused.value.exit_code == 64
    assert "--fresh" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(("override", "line"), UNSAFE)
def test_an_unsafe_change_is_refused(override: str, line: str) -> None:
    assert line in refusal(load(override), progress(load()))


def test_all_unsafe_changes_are_told_at_once_and_no_safe_one() -> None:
    text = refusal(load("run.seed=1", "data.shuffle=false", "actor.offload=false"), progress(load()))
    assert "run.seed" in text
    assert "data.shuffle" in text
    assert "offload" not in text


def test_another_algorithm_is_another_run() -> None:
    grpo = load_config(CONFIGS / "quickstart.yaml", ["run.name=quickstart_ppo"])
    assert 'algorithm.name: was "ppo", is "grpo"' in refusal(grpo, progress(load()))


def test_another_critic_to_start_from_is_another_run() -> None:
    config = load()
    elsewhere = config.model_copy(update={"critic": config.critic.model_copy(update={"path": "some/model"})})
    assert 'critic.path: was null, is "some/model"' in refusal(elsewhere, progress(config))


def test_rows_that_changed_under_the_same_name_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2", "demonstration": "2"}\n')
    config = load(f"data.train={rows}")
    before = progress(config)
    assert require_same_run(config, before) == []
    rows.write_text('{"prompt": "1+1=", "answer": "3", "demonstration": "2"}\n')
    with pytest.raises(ConfigError, match="MRL-1502"):
        require_same_run(config, before)


def test_progress_survives_json() -> None:
    before = progress(load())
    assert Progress.from_tree(json.loads(json.dumps(before.to_tree()))) == before


def test_progress_of_another_version_is_refused() -> None:
    tree = progress(load()).to_tree()
    del tree["num_samples"]
    with pytest.raises(DataError, match=r"MRL-2501 .*num_samples"):
        Progress.from_tree(tree)

"""The settings of a reward model, the phase that it adds, and tokens that it must share with the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.layout import max_prompt_tokens, max_sequence_length
from megarl.config.load import load_config
from megarl.config.phases import leaves_device, measured_phases, phases
from megarl.config.schema import RunConfig
from megarl.config.summary import summarise
from megarl.core.errors import ConfigError
from megarl.data.same_tokens import require_same_tokens
from megarl.data.tokenizer import load_tokenizer
from tests.unit.config_files import QUICKSTART

SCORING = "reward/compute_rewards"


def judge(directory: Path, **changes: Any) -> Path:
    """The config.json of a sequence classifier that fits the quickstart."""
    config = load_config(QUICKSTART).model.config
    own = {**(config or {}), "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, **changes}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(own))
    return directory


def load(path: Path | None, *overrides: str) -> RunConfig:
    return load_config(QUICKSTART, ["reward=model", *([f"reward_model.path={path}"] if path else []), *overrides])


def test_its_phase_needs_its_weights_alone(tmp_path: Path) -> None:
    config = load(judge(tmp_path), "reward_model.parallel.tp_size=2")
    scoring = next(phase for phase in phases(config) if phase.name == SCORING)
    assert scoring.parts == {"reward_model.weights"}
    assert measured_phases(config).count(SCORING) == 1
    assert leaves_device(config, "reward_model")
    assert not leaves_device(load(judge(tmp_path), "reward_model.offload=false"), "reward_model")
    report = summarise(config)
    assert "reward_model  tp 2" in report
    assert SCORING in report


def test_without_it_scoring_moves_nothing() -> None:
    config = load_config(QUICKSTART)
    assert not config.uses_reward_model
    assert SCORING not in [phase.name for phase in phases(config)]
    assert SCORING in measured_phases(config)


def test_one_evaluation_set_is_enough_to_have_it(tmp_path: Path) -> None:
    path = judge(tmp_path)
    config = load_config(QUICKSTART, ["eval.sets.held_out.reward=model", f"reward_model.path={path}"])
    assert config.uses_reward_model
    assert not load_config(QUICKSTART, [f"reward_model.path={path}"]).uses_reward_model, "nobody asks it"


@pytest.mark.parametrize(
    ("changes", "overrides", "told"),
    [
        (None, (), "MRL-1002"),
        ({"num_labels": 2}, (), "MRL-1207"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, (), "MRL-1201"),
        ({"vocab_size": 63}, (), "MRL-1113"),
        ({}, ("reward_model.parallel.tp_size=3",), "MRL-1101"),
        ({"num_hidden_layers": 3}, ("reward_model.parallel.pp_size=2",), "MRL-1103"),
        ({}, ("reward_model.max_tokens_per_microbatch=44",), "MRL-1105"),
        ({}, ("reward_model.megatron.hidden_size=3",), "MRL-1012"),
        ({}, ("reward_model.megatron.clip_grad=1.0",), "MRL-1012"),
    ],
)
def test_what_is_refused(changes: dict[str, Any] | None, overrides: tuple[str, ...], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        load(judge(tmp_path, **changes) if changes is not None else None, *overrides)


def test_tokens_are_those_of_the_policy(tmp_path: Path) -> None:
    policy = load_tokenizer("builtin:characters")
    require_same_tokens(policy, tmp_path, "reward_model.path", same_size=True)
    with pytest.raises(ConfigError, match=r"MRL-1493 .*another number of tokens"):
        require_same_tokens(policy, tmp_path, "reward_model.path", same_size=False)
    file = tmp_path / "tokenizer.json"
    file.write_text(policy.to_files()["tokenizer.json"])
    require_same_tokens(policy, tmp_path, "reward_model.path", same_size=False)
    own = json.loads(file.read_text())
    vocabulary = own["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(own))
    with pytest.raises(ConfigError, match=r"MRL-1493 .*the token .* has the id \d+, and there it is \d+"):
        require_same_tokens(policy, tmp_path, "reward_model.path", same_size=True)


def test_the_engine_has_room_for_the_longest_evaluation() -> None:
    longer = load_config(QUICKSTART, ["eval.sets.held_out.max_new_tokens=60", "rollout.max_prompt_tokens=50"])
    assert (max_sequence_length(longer), max_prompt_tokens(longer), max_prompt_tokens(longer, 60)) == (110, 50, 50)
    shorter = load_config(QUICKSTART, ["eval.sets.held_out.max_new_tokens=20", "rollout.max_prompt_tokens=50"])
    assert max_sequence_length(shorter) == 94
    assert max_prompt_tokens(load_config(QUICKSTART), 100) == 28, "of 128 positions"
    with pytest.raises(ConfigError, match=r"MRL-1106 .*eval.sets.held_out.max_new_tokens=128 leaves no room"):
        load_config(QUICKSTART, ["eval.sets.held_out.max_new_tokens=128"])

"""Mutated configurations: each is valid, or refused with one message. Nothing else ever comes out of `load_config`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megarl.config.catalogue import NAME, NUMBER, Setting, settings
from megarl.config.load import load_config
from megarl.config.summary import summarise
from megarl.core.errors import ConfigError, MissingInputError
from tests.unit.config_files import CONFIGS, MINIMAL, QUICKSTART, load_text, refusal

SHIPPED = {path.stem: path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("quickstart*.yaml"))}
FORBIDDEN = ("Traceback", "NoneType", "assert", "pydantic")
quick = hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
words = st.sampled_from(
    [
        "0",
        "-1",
        "1e-6",
        "1e400",
        ".nan",
        "-.inf",
        "true",
        "yes",
        "null",
        "''",
        "[]",
        "{}",
        "[1, 2]",
        "{a: 1}",
        "text",
        "*x",
        "&x 1",
        "!!python/name:os.system",
        "builtin:carry",
        "a:b",
        "9" * 60,
        "'\\0'",
        '"\\0"',
        "../..",
        "{",
        "~",
        "2026-01-01",
    ]
)


def loads_or_refuses(directory: Path, text: str, *overrides: str) -> None:
    """Load it in a directory that holds the parent too; a valid configuration must also be printable."""
    (directory / "quickstart.yaml").write_text(SHIPPED["quickstart"], encoding="utf-8")
    try:
        config = load_text(directory, text, *overrides)
    except (ConfigError, MissingInputError) as error:
        message = str(error)
        assert re.match(r"MRL-\d{4} ", message)
        assert not any(word in message for word in FORBIDDEN)
    else:
        summarise(config)


@quick
@given(data=st.data())
def test_mutated_text(tmp_path: Path, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(sorted(SHIPPED.values())))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        text = text[:start] + data.draw(st.text(max_size=5) | words) + text[start + length :]
    loads_or_refuses(tmp_path, text)


@quick
@given(data=st.data())
def test_mutated_lines(tmp_path: Path, data: st.DataObject) -> None:
    lines = data.draw(st.sampled_from(sorted(SHIPPED.values()))).splitlines()
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(lines) - 1))
        action = data.draw(st.sampled_from(["drop", "repeat", "swap", "indent", "value"]))
        if action == "drop" and len(lines) > 1:
            del lines[at]
        elif action == "repeat":
            lines.insert(at, lines[at])
        elif action == "swap":
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif action == "indent":
            lines[at] = " " * data.draw(st.integers(1, 4)) + lines[at]
        else:
            lines[at] = lines[at].partition(":")[0] + ": " + data.draw(words)
    loads_or_refuses(tmp_path, "\n".join(lines))


keys = st.sampled_from(sorted({".".join(setting.path) for setting in settings()}))
sections = st.sampled_from(
    ["run", "model", "model.config", "actor", "algorithm", "algorithm.kl", "eval.sets", "reward", "warmup"]
)


@quick
@given(overrides=st.lists(st.tuples(keys | sections | st.text(max_size=8), words | st.text(max_size=8)), max_size=4))
def test_arbitrary_overrides(tmp_path: Path, overrides: list[tuple[str, str]]) -> None:
    loads_or_refuses(tmp_path, MINIMAL, *(f"{key}={value}" for key, value in overrides))


shape_keys = st.sampled_from(
    [
        "architectures",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "max_position_embeddings",
        "tie_word_embeddings",
        "initializer_range",
        "hidden_act",
        "attention_bias",
        "model_type",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        "sliding_window",
        "layer_types",
    ]
)


@quick
@given(overrides=st.lists(st.tuples(shape_keys, words), min_size=1, max_size=3))
def test_arbitrary_model_configs(tmp_path: Path, overrides: list[tuple[str, str]]) -> None:
    for family in ("Qwen3", "Qwen2Moe", "Mistral"):
        text = MINIMAL.replace("Qwen3ForCausalLM", f"{family}ForCausalLM")
        loads_or_refuses(tmp_path, text, *(f"model.config.{key}={value}" for key, value in overrides))


rope_keys = st.sampled_from(
    ["rope_type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "mscale", "truncate"]
)
kinds = st.sampled_from(["linear", "llama3", "yarn", "dynamic"])


@quick
@given(kind=kinds, overrides=st.lists(st.tuples(rope_keys, words), max_size=3))
def test_arbitrary_rope_scalings(tmp_path: Path, kind: str, overrides: list[tuple[str, str]]) -> None:
    base = f"model.config.rope_scaling={{rope_type: {kind}, factor: 2, low_freq_factor: 1, high_freq_factor: 4}}"
    changes = (f"model.config.rope_scaling.{key}={value}" for key, value in overrides)
    loads_or_refuses(tmp_path, MINIMAL, base, *changes)


layout_keys = st.sampled_from([".".join(one.path) for one in settings() if "parallel" in one.path] + ["run.num_ranks"])
small = st.integers(1, 6).map(str) | st.sampled_from(["true", "null", "[1, 1]", "[2]", "4096", "1000000"])


@quick
@given(overrides=st.lists(st.tuples(layout_keys, small), max_size=6))
def test_arbitrary_layouts(tmp_path: Path, overrides: list[tuple[str, str]]) -> None:
    text = MINIMAL.replace("name: grpo", "name: ppo\n  kl: {coef: 0.1}").replace("Qwen3For", "Qwen3MoeFor")
    loads_or_refuses(tmp_path, text, *(f"{key}={value}" for key, value in overrides))


# -- nothing wrong is accepted: every setting of the schema refuses what its rule excludes


def base_for(setting: Setting) -> tuple[str, list[str]]:
    """A configuration in which the setting exists."""
    name = setting.algorithms[0] if len(setting.algorithms) == 1 else "grpo"
    text = MINIMAL.replace("name: grpo", "name: my.own:Algorithm" if name == "custom" else f"name: {name}")
    extra = []
    if setting.path[:2] == ("rollout", "converse") and setting.path[-1] != "name":
        extra.append("rollout.converse.name=my.own:converse")
    if setting.path[0] == "warmup":
        extra.append("warmup.num_steps=5")
    for sets in ("sets", "bench_sets"):
        if setting.path[:2] == ("eval", sets):
            extra.append(f"eval.{sets}.NAME={{data: builtin:sort}}")
    return text, extra


def wrong_values(setting: Setting) -> list[str]:
    rule = setting.rule
    wrong = ["[0]", "[1.5]", "[true]"] if "list" in rule else ["[1]"]
    if "list" in rule and "list of texts" not in rule:
        wrong.append("[x]")
    if "list" in rule and "empty" not in rule:
        wrong.append("[]")
    if "mapping" not in rule:
        wrong.append("{a: 1}")
    if "number" in rule:
        wrong += ["'1'", "yes", "true", ".nan", ".inf", "-.inf", "1e300", "-1"]
        wrong += ["0"] if "> 0" in rule or ">= 1" in rule or "> 1" in rule else []
        wrong += ["0.5"] if "whole" in rule else []
    elif "true or false" in rule:
        wrong += ["yes", "on", "1", "0", "'true'"]
    else:
        wrong += ["3", "1.5", "true"]
    if setting.choices:
        wrong += ["nonsense", "''"]
    if "null" not in rule and "may be empty" not in rule:
        wrong.append("null")
    allowed: tuple[str, ...] = ()
    if setting.path == ("track_with",):  # like in ROLL, where nothing means silence
        allowed = ("[]", "''", "null")
    elif setting.path == ("generation", "urls"):
        allowed = ("[]",)
    elif setting.path == ("reward", "weight"):  # a penalty
        allowed = ("-1",)
    elif setting.path == ("rollout", "filters"):
        allowed = ("[]",)
    elif setting.path == ("data", "train"):  # a list of paths
        allowed = ("[x]",)
    return [value for value in wrong if value not in allowed]


def is_secret(setting: Setting) -> bool:
    return setting.path in (("generation", "api_key"), ("generation", "admin_key"))


# settings inside a list are tested with their lists: test_config_sources.py
OUTSIDE_LISTS = [setting for setting in settings() if NUMBER not in setting.path]


@pytest.mark.parametrize("setting", OUTSIDE_LISTS, ids=lambda one: ".".join((*one.path, *one.algorithms[:1])))
def test_every_setting_refuses_what_its_rule_excludes(tmp_path: Path, setting: Setting) -> None:
    text, extra = base_for(setting)
    load_text(tmp_path, text, *extra)  # the base itself is right
    key = ".".join(setting.path)
    for value in wrong_values(setting):
        message = refusal(tmp_path, text, *extra, f"{key}={value}")
        first = message.splitlines()[0]
        codes = ("MRL-1003 command line", "MRL-1004 command line", *(("MRL-1013",) if is_secret(setting) else ()))
        assert first.startswith(codes), (value, message)
        assert key in first
        assert not any(word in message for word in FORBIDDEN)


# a typo in a very short word may mean anything, and a set of the user's choice can be called anything
# (a misspelt key of a secret is refused as a secret: its value must not be shown)
MISSPELT = [
    setting
    for setting in OUTSIDE_LISTS
    if len(setting.path[-1]) >= 4 and NAME not in setting.path and not is_secret(setting)
]


@pytest.mark.parametrize("setting", MISSPELT, ids=lambda one: ".".join((*one.path, *one.algorithms[:1])))
def test_every_misspelt_key_is_refused_and_the_right_one_suggested(tmp_path: Path, setting: Setting) -> None:
    text, extra = base_for(setting)
    *section, word = setting.path
    typo = word[:2] + word[3:]
    message = refusal(tmp_path, text, *extra, ".".join((*section, typo)) + "=1")
    assert f"Did you mean {'.'.join(setting.path)}?" in message


def test_the_quickstart_is_valid_to_begin_with() -> None:
    load_config(QUICKSTART)

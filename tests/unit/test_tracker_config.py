"""Trackers in the configuration: names, options, packages, and secrets that are never written out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.load import load_config
from megarl.config.resolved import dump_resolved
from megarl.config.secret_names import is_secret_key
from megarl.config.tracking import kwargs_of
from megarl.core.errors import ConfigError
from megarl.core.secret import Secret, mask_urls, resolve, scrub
from megarl.trackers.sinks import spelling_for
from megarl.trackers.to_stdout import console_for

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
CANARY = "canary-7f3a9b"
BOTH = "track_with=[wandb,swanlab]"


def load(*overrides: str):
    return load_config(QUICKSTART, overrides)


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert caught.value.exit_code == 64
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("track_with=wanddb",), ["MRL-1004", "Did you mean wandb?", "stdout, stdout_json, tensorboard"]),
        (("track_with=[stdout,swanlb]",), ["MRL-1004", 'track_with="swanlb"', "Did you mean swanlab?"]),
        (("track_with=[wandb,wandb]",), ["MRL-1005", "names wandb twice"]),
        (
            ("track_with=wandb", "tracker_kwargs.projct=x"),
            ["MRL-1001", "Did you mean project?", "Options of wandb: api_key, project"],
        ),
        (("track_with=tensorboard", "tracker_kwargs.logdir=x"), ["MRL-1001", "Did you mean log_dir?"]),
        (("track_with=wandb", "tracker_kwargs.tags=x"), ["MRL-1003", "a list of texts"]),
        (("track_with=swanlab", "tracker_kwargs.mode=ofline"), ["MRL-1004", "Did you mean offline?", "cloud, local"]),
        (("track_with=swanlab", "tracker_kwargs.login_kwargs.hots=x"), ["MRL-1001", "Did you mean host?", "timeout"]),
        (("track_with=swanlab", "tracker_kwargs.login_kwargs.timeout=-1"), ["MRL-1003", "a number above 0"]),
        ((BOTH, "tracker_kwargs.project=x"), ["MRL-1005", "which tracker", "{wandb: {...}, swanlab: {...}}"]),
        (("track_with=wandb", "tracker_kwargs={wandb: {}, mode: offline}"), ["MRL-1005", "tracker_kwargs.mode"]),
        ((BOTH, "tracker_kwargs.wandb.projct=x"), ["MRL-1001", "tracker_kwargs.wandb.projct", "project?"]),
        ((BOTH, "tracker_kwargs.wandb=3"), ["MRL-1003", "It must be a mapping"]),
    ],
)
def test_mistakes_are_told_with_what_to_write_instead(overrides: tuple[str, ...], told: list[str]) -> None:
    text = message(*overrides)
    for part in told:
        assert part in text


def test_options_of_one_tracker_may_be_given_either_way() -> None:
    flat = load("track_with=wandb", "tracker_kwargs.project=p")
    keyed = load("track_with=[stdout,wandb]", "tracker_kwargs={wandb: {project: p}, swanlab: {project: q}}")
    for config in (flat, keyed):
        assert kwargs_of("wandb", config.tracker_kwargs) == {"project": "p"}
    assert kwargs_of("tensorboard", keyed.tracker_kwargs) == {}


def test_options_do_no_harm_when_their_tracker_is_switched_off() -> None:
    assert load("track_with=stdout", "tracker_kwargs.project=p").track_with == ["stdout"]


@pytest.mark.parametrize(
    ("overrides", "package", "told"),
    [
        (("track_with=swanlab",), "swanlab", "swanlab needs the package swanlab"),
        (("track_with=swanlab", "tracker_kwargs.mode=local"), "swanboard", "swanlab[dashboard]"),
        (("track_with=wandb",), "wandb", "wandb needs the package wandb"),
    ],
)
def test_a_missing_package_is_told_with_what_to_install(
    overrides: tuple[str, ...],
    package: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == package else find_spec(name))
    assert main(["check", str(QUICKSTART), *overrides]) == 64
    error = capsys.readouterr().err
    assert error.startswith("MRL-1015 ")
    assert told in error
    assert 'pip install "megarl[trackers]"' in error


def test_a_secret_that_is_not_there_is_told_by_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for reference in ("env:MEGARL_TEST_UNSET", f"file:{tmp_path}/none"):
        arguments = ["track_with=wandb", f"tracker_kwargs.api_key={reference}"]
        assert main(["check", str(QUICKSTART), *arguments]) == 64
        assert f"MRL-1014 the secret {reference}" in capsys.readouterr().err
    monkeypatch.setenv("MEGARL_TEST_UNSET", CANARY)
    assert main(["check", str(QUICKSTART), "track_with=wandb", "tracker_kwargs.api_key=env:MEGARL_TEST_UNSET"]) == 0
    assert CANARY not in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [
        ("track_with=wandb", f"tracker_kwargs.api_key={CANARY}"),
        ("track_with=swanlab", f"tracker_kwargs.login_kwargs.api_key={CANARY}"),
        ("track_with=wandb", f"tracker_kwargs.settings={{x_extra_http_headers: {{Authorization: Bearer {CANARY}}}}}"),
        (f"reward.options.token={CANARY}",),
        (f"reward.options.judges=[{{password: {CANARY}}}]",),
        (f"reward.options.api_keys=[env:FINE,{CANARY}]",),
        ("reward.options.password=1234567",),
        (f"actor.megatron.hf_token={CANARY}",),
        (f"model.config.access_token={CANARY}",),
        (f"reward.options.url=https://user:{CANARY}@example.org/x",),
        (f"data.train=https://{CANARY}@example.org/x",),
        (f"run.name=ftp://u:{CANARY}@h",),
        (f"run.api_key={CANARY}",),
    ],
)
def test_a_secret_that_is_written_out_is_refused_and_never_shown(overrides: tuple[str, ...]) -> None:
    text = message(*overrides)
    assert "MRL-1013" in text
    assert CANARY not in text
    assert "1234567" not in text


@pytest.mark.parametrize(
    "word", [f"tracker_kwargs..api_key={CANARY}", f"api_key:{CANARY}", f"tracker_kwargs.api_key=[{CANARY}"]
)
def test_malformed_words_of_the_command_line_show_no_secret(word: str) -> None:
    assert CANARY not in message(word)


def test_an_unknown_option_of_the_command_line_shows_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(QUICKSTART), f"--api-key={CANARY}"]) == 64
    assert CANARY not in capsys.readouterr().err


def test_a_secret_given_twice_in_a_file_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"extends: {QUICKSTART}\ntracker_kwargs:\n  api_key: {CANARY}\n  api_key: {CANARY}2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert {"MRL-1007", "MRL-1013"} <= set(str(caught.value).split())
    assert "config.yaml:4" in str(caught.value)
    assert CANARY not in str(caught.value)


def test_references_are_what_is_written_down() -> None:
    config = load("track_with=wandb", "tracker_kwargs.api_key=env:WANDB_API_KEY")
    assert "api_key: env:WANDB_API_KEY" in dump_resolved(config)


@pytest.mark.parametrize(
    "key", ["api_key", "apiKey", "API-Key", "token", "hf_token", "access_tokens", "secret", "client_secret", "password",
            "db_passwd", "aws_credentials", "Authorization", "private_key", "secret_access_key", "key", "judge_key",
            "WANDB_KEY", "license_key", "api_keys", "secret_id", "token_value", "client_secret_value", "pwd", "pass",
            "private_key_pem"]
)  # fmt: skip
def test_names_of_secrets(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key", ["tokenizer", "max_new_tokens", "prompt_key", "answer_key", "demonstration_key", "eos_token", "pad_token",
            "num_key_value_heads", "label_key", "compass", "eos_token_id",
            "prompt_id", "moe_token_dispatcher_type", "token_level", "keys", "", "monkey", "author"]
)  # fmt: skip
def test_names_of_other_things(key: str) -> None:
    assert not is_secret_key(key)


def test_numbers_of_tokens_are_not_secrets() -> None:
    assert load("reward.options.after=null", "rollout.max_new_tokens=5").rollout.max_new_tokens == 5


def test_a_secret_shows_itself_as_a_mask(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{CANARY}\n")
    secret = resolve(f"file:{path}")
    assert secret.reveal() == CANARY
    assert {str(secret), repr(secret), f"{secret}"} == {"***"}
    with pytest.raises(TypeError):
        json.dumps(secret)
    assert scrub(f"401 for key {CANARY}", [Secret(CANARY)]) == "401 for key ***"
    assert mask_urls(f"GET https://me:{CANARY}@host/x") == "GET https://***@host/x"


STEP = {"critic/score/mean": 0.5, "actor/lr": 1e-6, "memory/cpu/a/b/end/rss": 1.0, "user/x": float("nan")}


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [
        ((), ["step:3 - critic/score/mean:0.5 - actor/lr:0.000001 - user/x:nan"]),
        (("track_with=tensorboard",), ["step:3"]),
        (("track_with=[]",), []),
        (("track_with=stdout_json",), ["metrics_tag: "]),
        (("track_with=[stdout_json,stdout]",), ["step:3", "metrics_tag: "]),
        (("metrics.console_include=['critic/**','user/*']",), ["step:3 - critic/score/mean:0.5 - user/x:nan"]),
        (("metrics.console_exclude=['actor/*']",), ["step:3 - critic/score/mean:0.5 - memory/cpu/a/b/end/rss:1.0"]),
    ],
)
def test_the_console_is_as_track_with_wants_it(
    overrides: tuple[str, ...], starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    console = console_for(load(*overrides))
    console.log(STEP, 3)
    console.write("announcement")
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "announcement"
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)


def test_roll_s_form_is_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    console_for(load("track_with=stdout_json", "metrics.view=native")).log(STEP, 3)
    line = capsys.readouterr().out
    tree = json.loads(line.removeprefix("metrics_tag: "), parse_constant=refuse)
    assert tree == {"step": 3, "metrics": STEP | {"user/x": "NaN"}}


def test_a_view_for_one_place_leaves_the_others_alone() -> None:
    config = load("metrics.view_per_sink={tensorboard: roll}")
    step = {"critic/vf_loss": 1.0}
    assert spelling_for(config, "console").spell(step) == {"critic/vf_loss": 1.0}
    assert spelling_for(config, "tensorboard").spell(step) == {"critic/loss": 1.0}
    assert spelling_for(config, "wandb").spell(step) == {"critic/vf_loss": 1.0, "critic/loss": 1.0}


def test_a_place_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"metrics.view_per_sink has no \"tensorbord\"\. Did you mean tensorboard"):
        load("metrics.view_per_sink={tensorbord: roll}")


@pytest.mark.parametrize("name", ["x.", ".x", "a/x.", "x./a"])
def test_a_set_has_a_name_that_every_dashboard_takes(name: str) -> None:
    with pytest.raises(ConfigError, match="MRL-1004"):
        load(f'eval.sets={{"{name}": {{data: builtin:sort}}}}')

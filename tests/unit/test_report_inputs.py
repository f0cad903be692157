"""The other files of a run directory: settings, timeline, samples. Each may be missing, odd or too large."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.report.samples import read_samples, token_texts
from megarl.report.settings import Settings, differing, read_settings
from megarl.report.timeline import read_timeline
from tests.unit.report_runs import encode, make_run, sample

CHARACTERS = Settings(tree={"model": {"tokenizer": "builtin:characters"}})


def test_settings_are_shown_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(
        "run: {name: x, num_ranks: 8}\nactor: {parallel: {tp_size: 2, pp_size: 2, cp_size: 1}}\n"
        "rollout: {max_new_tokens: 12}\nmodel: {tokenizer: builtin:characters}\n"
        "tracker_kwargs: {wandb: {api_key: s3cret}, swanlab: {login_kwargs: {api_key: [s3cret]}, token: s3cret}}\n"
    )
    found = read_settings(tmp_path)
    assert "s3cret" not in found.text + str(found.flat) + str(found.tree)
    assert found.flat["rollout.max_new_tokens"] == "12"
    assert found.flat["model.tokenizer"] == "builtin:characters"
    assert found.layout == "8 ranks = tp 2 × pp 2 × dp 2"


@pytest.mark.parametrize("content", [None, "", "[1, 2]", "a: [", "\x00"])
def test_settings_that_are_none_are_empty(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "resolved.yaml").write_text(content)
    assert read_settings(tmp_path) == Settings()
    assert Settings().layout == ""


def test_settings_of_two_runs_are_compared() -> None:
    ours = Settings(flat={"a": "1", "b": "2", "only": "x"})
    theirs = Settings(flat={"a": "1", "b": "3", "new": "y"})
    assert differing(ours, theirs) == [("b", "2", "3"), ("only", "x", "–"), ("new", "–", "y")]


def test_the_timeline_shows_some_steps_and_every_rank(tmp_path: Path) -> None:
    steps = read_timeline(make_run(tmp_path / "run", num_steps=100, num_devices=3))
    assert len(steps) == 20
    assert steps[0]["step"] == 1
    assert [row["label"] for row in steps[0]["rows"]] == ["rank 0", "rank 1", "rank 2"]
    assert steps[0]["rows"][0]["segments"][0] == ["actor_infer/generate", 0, 0, pytest.approx(0.5, rel=0.2)]


def test_of_many_ranks_the_timeline_shows_the_telling_ones(tmp_path: Path) -> None:
    seconds = {rank: 1.0 + rank / 100 for rank in range(65)}
    segments = [[rank, "a/b", "execute", 0.5, length] for rank, length in seconds.items()]
    (tmp_path / "timeline.jsonl").write_text(json.dumps({"step": 7, "segments": segments}) + "\n")
    (step,) = read_timeline(tmp_path)
    labels = [row["label"] for row in step["rows"]]
    assert labels == ["slowest: rank 64", "median: rank 32", "fastest: rank 0", "mean of 65 ranks"]
    assert step["rows"][3]["segments"] == [["a/b", 1, 0.5, 1.32]]


def test_odd_lines_of_a_timeline_are_passed_over(tmp_path: Path) -> None:
    good = {
        "step": 2,
        "segments": [[0, "a/b", "execute", 0, 1], [0, "a/b", "dance", 0, 1], "x", [1, "a/b", "onload", 0, -1]],
    }
    lines = ["nonsense", '{"step": 1, "segments": 3}', json.dumps(good), json.dumps(good)[:-1]]
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines))
    assert read_timeline(tmp_path) == [
        {"step": 2, "num_ranks": 1, "rows": [{"label": "rank 0", "segments": [["a/b", 1, 0, 1]]}]}
    ]
    assert read_timeline(tmp_path / "nothing") == []


def test_samples_have_texts_and_numbers_of_their_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=10, num_devices=1)
    steps = read_samples(run, CHARACTERS)
    assert [step["step"] for step in steps] == [1, 5, 10]
    group = steps[-1]["groups"][0]
    shown = group["samples"][0]
    assert "".join(shown["tokens"]).endswith("<eos>")
    assert "=" not in shown["tokens"][0], "the prompt is not part of the response"
    assert len(shown["tokens"]) == len(shown["logprobs"]) == len(shown["advantages"]) == shown["num_tokens"]


def test_tokens_that_the_policy_did_not_write_have_no_numbers(tmp_path: Path) -> None:
    one = sample("1+1=", "2", True, 0, np.random.default_rng(0))
    one["token_ids"] += encode("tool") + encode("3")
    one["loss_mask"] += [0, 0, 0, 0, 1]
    one["rollout_logprobs"] += [0, 0, 0, 0, -0.5]
    one["old_logprobs"] = [0.0]  # of the wrong length: not shown
    _write_group(tmp_path, [one])
    shown = read_samples(tmp_path, CHARACTERS)[0]["groups"][0]["samples"][0]
    assert shown["tokens"] == ["2", "<eos>", "t", "o", "o", "l", "3"]
    assert shown["logprobs"][2:6] == [None] * 4
    assert "old_logprobs" not in shown


def test_without_its_tokenizer_a_token_is_a_number(tmp_path: Path) -> None:
    _write_group(tmp_path, [sample("1=", "1", True, 0, np.random.default_rng(0))])
    lost = Settings(tree={"model": {"tokenizer": str(tmp_path / "gone")}})
    assert read_samples(tmp_path, lost)[0]["groups"][0]["samples"][0]["tokens"] == ["⟨4⟩", "⟨1⟩"]


def test_a_step_that_was_recorded_again_and_odd_lines(tmp_path: Path) -> None:
    first = sample("1=", "1", True, 0, np.random.default_rng(0))
    second = {**first, "reward": 0.25}
    path = _write_group(tmp_path, [first])
    path.write_text(path.read_text() + "nonsense\n[]\n" + _line([second]) + '{"group": 1}\n')
    (step,) = read_samples(tmp_path, CHARACTERS)
    assert [one["reward"] for group in step["groups"] for one in group["samples"]] == [0.25]


def test_long_samples_are_cut_and_steps_have_a_budget(tmp_path: Path) -> None:
    long = sample("1=", "1" * 6000, True, 0, np.random.default_rng(0))
    path = _write_group(tmp_path, [long])
    path.write_text("".join(_line([long], group) for group in range(5)))
    (step,) = read_samples(tmp_path, CHARACTERS)
    shown = step["groups"][0]["samples"][0]
    assert (len(shown["tokens"]), shown["num_tokens"]) == (4000, 6001)
    assert step["num_groups"] == 5
    assert len(step["groups"]) == 3  # 4,000 tokens each: the third one exceeds 10,000


def _byte_level() -> Tokenizer:
    """Every byte is a token: characters beyond ASCII have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer("bytes", backend, 0, ())


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
def test_texts_of_tokens_are_the_text(text: str) -> None:
    tokenizer = _byte_level()
    ids = tokenizer.encode(text).tolist()
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    tokenizer = _byte_level()
    assert token_texts(tokenizer, tokenizer.encode("aé").tolist()) == ["a", "", "é"]
    assert token_texts(load_tokenizer("builtin:characters"), [3, 13, 1]) == ["0", "+", "<eos>"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_are_shown_anyhow(ids: list[int]) -> None:
    assert len(token_texts(_byte_level(), ids)) == len(ids)


def _line(samples: list[dict[str, object]], group: int = 0) -> str:
    prompt = {"id": "p", "text": "1=", "token_ids": encode("1="), "answer": None}
    return json.dumps({"step": 1, "group": group, "prompt": prompt, "samples": samples}) + "\n"


def _write_group(directory: Path, samples: list[dict[str, object]]) -> Path:
    (directory / "samples").mkdir()
    path = directory / "samples" / "step_000001.jsonl"
    path.write_text(_line(samples))
    return path

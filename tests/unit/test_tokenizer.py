"""Tokenizers: control tokens never come out of text, and the end of a text is found in any of the usual files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from megarl.core.errors import ConfigError, DataError, MissingInputError
from megarl.data.tokenizer import CHARACTERS, load_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_directory(path: Path, **files: dict[str, Any]) -> Path:
    """A Hugging Face directory with a byte-level BPE that truncates and pads unless told not to."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(["the cat sat on the mat"], trainer)
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_characters_have_the_ids_of_the_recipe() -> None:
    tokenizer = load_tokenizer("builtin:characters")
    assert tokenizer.encode(" 09+=:az").tolist() == [2, 3, 12, 13, 16, 17, 22, 47]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.stop_token_ids) == (64, 1, (1,))


@given(st.text(alphabet=CHARACTERS))
def test_characters_round_trip_one_token_each(text: str) -> None:
    tokenizer = load_tokenizer("builtin:characters")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_decoding_leaves_out_the_end_but_shows_unused_ids() -> None:
    tokenizer = load_tokenizer("builtin:characters")
    assert tokenizer.decode([4, 5, 1, 0]) == "12"
    assert tokenizer.decode([4, 1], skip_special=False) == "1<eos>"
    # An untrained model may sample an unused id; a reward must not mistake the response for a clean one.
    assert tokenizer.decode([4, 63, 5]) != "12"


@pytest.mark.parametrize(("text", "named"), [("1+1=é", "'é'"), ("Abc", "'A'"), ("1\n", r"'\n'"), ("<eos>", "'<'")])
def test_a_character_outside_the_vocabulary_is_named(text: str, named: str) -> None:
    with pytest.raises(DataError, match="MRL-2004") as caught:
        load_tokenizer("builtin:characters").encode(text)
    assert named in str(caught.value)


def test_special_strings_in_text_stay_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_directory(tmp_path / "model", tokenizer_config={"eos_token": "<|im_end|>"})))
    text = "".join(SPECIAL) + "the cat"
    ids = tokenizer.encode(text)
    assert not set(ids.tolist()) & {0, 1, 2}
    assert tokenizer.decode(ids) == text, "neither truncated nor padded"


def test_any_text_survives_a_byte_level_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_directory(tmp_path / "model", config={"eos_token_id": 0})))
    text = "emoji 🙂, NUL \x00, right-to-left \u202eabc, newline\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    ("files", "eos", "stops"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "generation_config": {"eos_token_id": [0, 2]}}, 2, (0, 2)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}, "config": {"eos_token_id": 0}}, 2, (0, 2)),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, 2, (2,)),
        ({"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 1}}, 2, (0, 2)),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 1}}, 1, (1,)),
    ],
)
def test_where_the_end_of_a_text_is_found(
    tmp_path: Path, files: dict[str, Any], eos: int, stops: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(str(make_directory(tmp_path / "model", **files)))
    assert (tokenizer.eos_token_id, tokenizer.stop_token_ids) == (eos, stops)


@pytest.mark.parametrize(
    "files",
    [{}, {"tokenizer_config": {"eos_token": "<nowhere>"}}, {"config": {"eos_token_id": "2"}}, {"config": [1]}],
)
def test_an_unknown_end_is_an_error(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"MRL-140[23]"):
        load_tokenizer(str(make_directory(tmp_path / "model", **files)))


def test_missing_and_broken_directories(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="builtin:characters"):
        load_tokenizer("builtin:words")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"MRL-1402"):
        load_tokenizer(str(tmp_path))

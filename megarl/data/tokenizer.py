"""Text to token ids and back, without control tokens sneaking in.

Prompts are foreign text. Whatever they spell, `Tokenizer.encode` never yields a control token: ``"<|im_end|>"`` in a
prompt is encoded as the characters that it is made of (see `control_tokens`). Nothing is ever downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers

from megarl.config.tokenizer_files import named_tokens, read_object
from megarl.core.errors import ConfigError, DataError, MissingInputError
from megarl.core.excerpt import excerpt
from megarl.data.control_tokens import ControlTokens

CHARACTERS = " 0123456789+-*=:?#,.abcdefghijklmnopqrstuvwxyz"
CHARACTERS_VOCAB_SIZE = 64
_PAD, _EOS = "<pad>", "<eos>"


class Tokenizer:
    """A tokenizer of the `tokenizers` library, and where its sentences end.

    ``eos_token_id`` ends a demonstration; sampling stops at any of ``stop_token_ids``, which include it. Every id is
    below ``vocab_size``. ``alphabet`` holds the only characters that can be encoded; None when any text can.
    ``named_tokens`` are the texts of ``bos_token``, ``eos_token`` and so on.
    """

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        eos_token_id: int,
        stop_token_ids: Iterable[int],
        alphabet: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may ask for truncation or padding; a prompt must arrive whole and alone.
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self.eos_token_id = eos_token_id
        self.stop_token_ids = tuple(sorted({eos_token_id, *stop_token_ids}))
        self.named_tokens = dict(named_tokens or {})
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._backend = backend
        self._alphabet = alphabet
        self._outside_alphabet = None if alphabet is None else re.compile(f"[^{re.escape(alphabet)}]")

    @cached_property
    def control(self) -> ControlTokens:
        """The control tokens. Made when first asked for: not every rank has text to encode."""
        return ControlTokens(self._backend)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids of ``text``; no BOS, no EOS, no control tokens but those under their secret names."""
        problem = self.why_not_encodable(text)
        if problem is not None:
            raise DataError("MRL-2004", f"{problem} Text: {excerpt(text)}.")
        return self.control.encode(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ``ids``; control tokens are left out unless asked for."""
        text: str = self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)
        return text

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, control tokens included."""
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def to_files(self) -> dict[str, str]:
        """The content of a ``tokenizer.json`` and ``tokenizer_config.json`` that `transformers` reads as this one."""
        eos_token = self._backend.id_to_token(self.eos_token_id)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
        return {
            "tokenizer.json": self._backend.to_str(),
            "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        }

    def why_not_encodable(self, text: str) -> str | None:
        """One sentence that names what cannot be encoded, or None. Much cheaper than encoding."""
        if self._outside_alphabet is not None:
            found = self._outside_alphabet.search(self.control.without_names(text))
            if found is not None:
                return f"The character {found[0]!r} is not in the vocabulary of {self.name} ({self._alphabet!r})."
        elif not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                return f"The character {text[error.start]!r} is half of a surrogate pair and no text."
        return None


def load_tokenizer(spec: str) -> Tokenizer:
    """``"builtin:characters"``, or a local directory with a ``tokenizer.json``."""
    if spec == "builtin:characters":
        return _characters()
    if spec.startswith("builtin:"):
        raise ConfigError("MRL-1401", f"model.tokenizer={spec!r} is not known. Built in: builtin:characters.")
    return _from_directory(Path(spec))


def _characters() -> Tokenizer:
    """One token per character; 0 is padding, 1 ends a text, ids past the characters are never produced from text."""
    names = [_PAD, _EOS, *CHARACTERS]
    names += [f"<unused{index}>" for index in range(len(names), CHARACTERS_VOCAB_SIZE)]
    backend = tokenizers.Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([_PAD, _EOS])
    return Tokenizer(
        "builtin:characters", backend, names.index(_EOS), (), CHARACTERS, {"eos_token": _EOS, "pad_token": _PAD}
    )


def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise MissingInputError(
            "MRL-4101",
            f"model.tokenizer={str(directory)!r}: there is no tokenizer.json in it.\n"
            'Give a local Hugging Face directory, or "builtin:characters"; nothing is downloaded.',
        )
    backend = _read_backend(path)
    stop_token_ids = _stop_token_ids(directory)
    eos_token_id = _eos_token_id(directory, backend)
    if eos_token_id is None and stop_token_ids:
        eos_token_id = stop_token_ids[0]
    if eos_token_id is None:
        raise ConfigError(
            "MRL-1403",
            f"{directory}: no file names the token that ends a text.\n"
            'Write "eos_token" into tokenizer_config.json, or "eos_token_id" into generation_config.json.',
        )
    return Tokenizer(str(directory), backend, eos_token_id, stop_token_ids, named_tokens=named_tokens(directory))


def read_vocabulary(path: Path) -> dict[str, int]:
    """The id of every token of a ``tokenizer.json``."""
    found: dict[str, int] = _read_backend(path).get_vocab(with_added_tokens=True)
    return found


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ConfigError("MRL-1402", f"{path}: not a tokenizer.json ({excerpt(str(error))}).") from error


def _eos_token_id(directory: Path, backend: tokenizers.Tokenizer) -> int | None:
    """The tokenizer's own end-of-text token, given by its text."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_object(directory / name).get("eos_token")
        if isinstance(token, dict):  # a serialized AddedToken
            token = token.get("content")
        if token is None:
            continue
        token_id: int | None = backend.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise ConfigError("MRL-1403", f"{directory / name}: eos_token {excerpt(str(token))} is not a known token.")
        return token_id
    return None


def _stop_token_ids(directory: Path) -> list[int]:
    """What the model was made to stop at: one id or several, of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        found = read_object(directory / name).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ConfigError(
                "MRL-1403", f"{directory / name}: eos_token_id must be a token id or a list of them, not {found!r}."
            )
        return ids
    return []

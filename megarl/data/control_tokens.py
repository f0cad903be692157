"""Control tokens that text cannot spell.

A tokenizer's added tokens (``<|im_end|>``, ``<think>``) are control tokens: they are the chat template's to place. The
library finds them by their spelling wherever it stands, also in a user's question. So text is encoded by a second
backend, which is the first one in everything but this: its added tokens have secret names, drawn when the process
starts, and their real spellings are plain text to it. A template's own literals are given the secret names before
anything foreign comes near them; nothing that a user writes can become a control token, alone, across two messages or
together with a piece of the template.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tokenizers import models

from megarl.core.errors import DataError
from megarl.core.excerpt import excerpt

# Private-use characters: caseless, no white space, and left alone by every Unicode normalisation.
_FIRST, _NUM_PRIVATE = 0xE000, 6400
_NUM_SECRET, _NUM_INDEX = 8, 2


class ControlTokens:
    """The control tokens of ``backend``, and the only way from text to token ids.

    Added tokens that are white space alone, and are not special, are text in a shorter form and stay with the text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        tokens = {token.content: token for token in added.values() if token.content and not _is_text(token)}
        self._ids: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.content in tokens
        }
        secret = "".join(chr(_FIRST + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_NUM_SECRET))
        self._names = {
            text: secret + chr(_FIRST + index // _NUM_PRIVATE) + chr(_FIRST + index % _NUM_PRIVATE)
            for index, text in enumerate(tokens)
        }
        self._spellings = {name: text for text, name in self._names.items()}
        # stands for a text whose place in a rendering is to be found again
        self.mark = secret + chr(_FIRST + _NUM_PRIVATE - 1) * _NUM_INDEX
        self._find_name = re.compile(f"{secret}[{chr(_FIRST)}-{chr(_FIRST + _NUM_PRIVATE - 1)}]{{{_NUM_INDEX}}}")
        self._find_any = _any_of(tokens)
        self._find_ordinary = _any_of([text for text, token in tokens.items() if not token.special])
        # some control token that leaves what follows it as it is; empty if there is none
        self.name_before_text = next((self._names[text] for text, token in tokens.items() if not token.rstrip), "")
        self._backend, unknown = _without(backend, self._names)
        self._backend.add_tokens([_renamed(token, self._names.get(token.content)) for token in added.values()])
        self._real_id = {self._backend.token_to_id(name): self._ids[text] for text, name in self._names.items()}
        # an unknown character is no control token, though the token for it may be a special one
        self._guarded = frozenset(self._ids.values()) - {unknown}

    @property
    def ids(self) -> frozenset[int]:
        """All control tokens."""
        return frozenset(self._ids.values())

    def hide(self, text: str) -> str:
        """Text of a template, or of the user's own program: spellings of control tokens become their secret names."""
        return self._find_any.sub(lambda found: self._names[found[0]], text)

    def hide_ordinary(self, text: str) -> str:
        """What the policy itself said: it may think and call tools, but special tokens are not its to write."""
        return self._find_ordinary.sub(lambda found: self._names[found[0]], text)

    def show(self, text: str) -> str:
        """The text with real spellings, for people."""
        return self._find_name.sub(lambda found: self._spellings.get(found[0], ""), text)

    def without_names(self, text: str) -> str:
        """Only the plain text."""
        return self._find_name.sub("", text)

    def spelled_in(self, text: str) -> str | None:
        """The first control token whose real spelling is in ``text``."""
        found = self._find_any.search(text)
        return found[0] if found else None

    def name_at_start(self, text: str) -> str | None:
        """The secret name that ``text`` begins with."""
        found = self._find_name.match(text)
        return found[0] if found else None

    def id_of(self, name: str) -> int:
        """The token behind a secret name."""
        return self._ids[self._spellings[name]]

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids: control tokens for secret names, and nothing but text for the rest."""
        ids = [self._real_id.get(one, one) for one in self._backend.encode(text, add_special_tokens=False).ids]
        num_control = sum(one in self._guarded for one in ids)
        if num_control != sum(self.id_of(name) in self._guarded for name in self._find_name.findall(text)):
            raise DataError(
                "MRL-2043",
                f"a text would be encoded with control tokens that nobody placed: {excerpt(self.show(text))}.\n"
                "The tokenizer builds them out of plain text. Take another tokenizer, or leave this text out.",
            )
        return np.asarray(ids, dtype=np.int64)


def _is_text(token: tokenizers.AddedToken) -> bool:
    return not token.special and not token.content.strip(" \t\r\n▁")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the leftmost and there the longest, as the library does."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _renamed(token: tokenizers.AddedToken, name: str | None) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content if name is None else name,
        single_word=token.single_word if name is None else False,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _without(backend: tokenizers.Tokenizer, names: dict[str, str]) -> tuple[tokenizers.Tokenizer, int | None]:
    """The backend without added tokens, and its token for unknown characters.

    Where the model itself could find a control token in text, its vocabulary has the secret name instead.
    """
    bare = tokenizers.Tokenizer(backend.model)  # shared, not copied
    bare.normalizer, bare.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    if not _finds_any(bare, names):
        unknown = getattr(backend.model, "unk_token", None)
        return bare, backend.token_to_id(unknown) if unknown is not None else None
    tree = json.loads(backend.to_str())
    tree.update(added_tokens=[], post_processor=None, decoder=None)
    unknown_id = _rename_in_model(tree["model"], names)
    return tokenizers.Tokenizer.from_str(json.dumps(tree)), unknown_id


def _finds_any(bare: tokenizers.Tokenizer, texts: Iterable[str]) -> bool:
    """Whether the model, without any added token, may take one of these texts for a token of its own.

    A BPE makes tokens by merging: one that the text alone is not merged into is not made anywhere. Other models look
    words up.
    """
    ids = {text: token_id for text in texts if (token_id := bare.model.token_to_id(text)) is not None}
    if isinstance(bare.model, models.BPE) and not bare.model.ignore_merges:
        return any(token_id in bare.encode(text, add_special_tokens=False).ids for text, token_id in ids.items())
    return bool(ids)


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> int | None:
    """Change the vocabulary's words in place; the id for unknown characters."""
    if isinstance(model["vocab"], list):  # Unigram: pairs of a text and its score
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        unknown_id: int | None = model.get("unk_id")
        return unknown_id
    model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    unknown = model.get("unk_token")
    if unknown is None:
        return None
    model["unk_token"] = names.get(unknown, unknown)
    named_id: int | None = model["vocab"].get(model["unk_token"])
    return named_id

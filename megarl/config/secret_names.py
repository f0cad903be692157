"""Which settings hold secrets, by their names."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_ALWAYS = (
    "password", "passwd", "passphrase", "pass", "pwd", "secret", "credential", "authorization", "apikey", "cookie",
    "bearer",
)  # fmt: skip
# words behind the one that counts: token_value, secret_id, private_key_pem
_FORMS = ("value", "text", "string", "plain", "id", "pem", "hex", "b64", "base64")
# a key is a secret, unless it says where in a row of data something is
_KINDS_OF_COLUMN = (
    "prompt", "answer", "demonstration", "input", "output", "label", "target", "question", "response", "message",
    "messages", "content", "text", "image", "video", "audio", "metadata", "reward", "score", "field", "column", "row",
    "group", "sort", "dict", "json", "primary", "problem", "solution", "data", "source", "tests",
)  # fmt: skip
_KINDS_OF_MANY = ("api", "access", "secret", "private", "auth", "refresh", "service", "account")
# a token is a secret, unless it is one of a language model's; several are mostly counted
_KINDS_OF_TEXT_TOKEN = (
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "end", "first", "last", "new", "per",
    "special", "added", "extra", "think", "image", "video", "audio", "vision", "prompt", "decoder", "forced", "bad",
)  # fmt: skip


def is_secret_key(key: str) -> bool:
    """Whether a setting of this name holds a secret. In doubt it does: the remedy, a reference, is one word long."""
    words = [word.lower() for word in _WORDS.findall(key)]
    while len(words) > 1 and words[-1] in _FORMS:
        words.pop()
    before, last = ["", "", *words][-2:]
    if last in ("tokens", "keys"):
        return before in _KINDS_OF_MANY
    if last == "token":
        return before not in _KINDS_OF_TEXT_TOKEN
    if last == "key":
        return before not in _KINDS_OF_COLUMN
    return last in _ALWAYS or last.removesuffix("s") in _ALWAYS

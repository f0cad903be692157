"""Which settings hold secrets, by their names."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_ALWAYS = ("password", "passwd", "passphrase", "secret", "credential", "authorization", "apikey", "cookie", "bearer")
_KINDS_OF_KEY = ("api", "access", "secret", "private", "auth", "ssh", "signing", "encryption", "account", "service")
# a token is a secret, unless it is one of a language model's; several are mostly counted
_KINDS_OF_TEXT_TOKEN = (
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "end", "first", "last", "new", "per",
    "special", "added", "extra", "think", "image", "video", "audio", "vision", "prompt", "decoder", "forced", "bad",
)  # fmt: skip


def is_secret_key(key: str) -> bool:
    """Whether a setting of this name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(key)]
    before, last = ["", "", *words][-2:]
    if last in ("key", "keys", "tokens"):
        return before in _KINDS_OF_KEY
    if last == "token":
        return before not in _KINDS_OF_TEXT_TOKEN
    return last in _ALWAYS or last.removesuffix("s") in _ALWAYS

"""Secrets: written as references, looked up at use, masked wherever they would be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from megarl.core.errors import ConfigError

MASK = "***"
_CREDENTIALS_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)[^/\s@?#]+@")
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*\Z|file:[^\x00]+\Z")


class Secret:
    """Text that shows itself as a mask: in messages, logs, tracebacks and dumps alike."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself, for the one call that needs it."""
        return self._text

    def __repr__(self) -> str:
        return MASK

    __str__ = __repr__


def is_reference(text: str) -> bool:
    """Whether the text only says where a secret is: ``env:NAME`` or ``file:PATH``."""
    return _REFERENCE.match(text) is not None


def resolve(reference: str) -> Secret:
    """Look the secret up. Raises a `ConfigError` that names the reference if nothing is there."""
    kind, _, place = reference.partition(":")
    try:
        text = os.environ.get(place, "") if kind == "env" else Path(place).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _not_there(reference, f"the file cannot be read: {reason}") from None
    if not text:
        what = "the environment variable is not set" if kind == "env" else "the file is empty"
        raise _not_there(reference, what)
    return Secret(text)


def scrub(text: str, secrets: Iterable[Secret]) -> str:
    """The text with every one of the secrets masked, however it got in."""
    for secret in secrets:
        text = text.replace(secret.reveal(), MASK)
    return text


def has_url_credentials(text: str) -> bool:
    """Whether there is a URL with a user name or a password in the text."""
    return _CREDENTIALS_IN_URL.search(text) is not None


def mask_urls(text: str) -> str:
    """The text without the user names and passwords of its URLs."""
    return _CREDENTIALS_IN_URL.sub(rf"\1{MASK}@", text)


def _not_there(reference: str, what: str) -> ConfigError:
    return ConfigError("MRL-1014", f"the secret {reference} cannot be looked up: {what}.")

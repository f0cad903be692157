"""Whether another model reads the policy's token ids as what they are."""

from __future__ import annotations

from pathlib import Path

from megarl.core.errors import ConfigError
from megarl.core.excerpt import excerpt
from megarl.data.tokenizer import Tokenizer, read_vocabulary


def require_same_tokens(policy: Tokenizer, directory: Path, setting: str, *, same_size: bool) -> None:
    """Refuse a model whose tokenizer gives some token of the policy's another id, or none.

    More tokens do no harm: nobody writes them. A directory without a tokenizer is believed if ``same_size``: its model
    knows as many ids as the policy.
    """
    if not (directory / "tokenizer.json").is_file():
        if same_size:
            return
        raise ConfigError(
            "MRL-1493",
            f"{setting}={str(directory)!r} knows another number of tokens than the policy, and has no tokenizer.json "
            "that would show which they are.\nPut its tokenizer.json there, or use another model.",
        )
    theirs = read_vocabulary(directory / "tokenizer.json")
    for token, number in policy.vocabulary().items():
        if theirs.get(token) != number:
            found = f"there it is {theirs[token]}" if token in theirs else "there is no such token there"
            raise ConfigError(
                "MRL-1493",
                f"{setting}={str(directory)!r} has another tokenizer than the policy: the token {excerpt(token)} has "
                f"the id {number}, and {found}.\nIt reads the policy's ids: use a model with the policy's tokenizer.",
            )

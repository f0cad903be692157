"""1 if the response is the answer, else 0."""

from __future__ import annotations

from megarl.core.errors import DataError
from megarl.core.sample import Prompt, Sample


def exact_match(prompt: Prompt, sample: Sample, *, after: str | None = None) -> float:
    """Compare the response with the answer, character by character.

    With ``after``, only what follows its last occurrence counts, and a response without it earns 0.
    """
    if prompt.answer is None:
        raise DataError(
            "MRL-2101",
            f'reward "exact_match": prompt {prompt.id!r} has no answer to compare with.\n'
            "Give every row an answer (data.answer_key names its key), or use another reward.",
        )
    found = sample.response
    if after is not None:
        _, marker, found = found.rpartition(after)
        if not marker:
            return 0.0
    return float(found == prompt.answer)

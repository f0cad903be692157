"""Requests that no engine of this shape can serve are refused before they get in."""

from __future__ import annotations

import numpy as np

from megarl.core.errors import EngineError
from megarl.core.protocols import GenerationRequest
from megarl.generation.embedded.sampler import check_params


def check_request(request: GenerationRequest, vocab_size: int, max_sequence_length: int) -> None:
    """Raise if the request has no meaning for a model with this vocabulary, or no room."""
    check_params(request.params)
    who, length, new = f"request {request.id[:80]!a}", len(request.token_ids), request.params.max_new_tokens
    if length + new > max_sequence_length:
        raise EngineError(
            "MRL-5101",
            f"{who}: {length} prompt tokens + max_new_tokens {new} = {length + new}, more than the engine's "
            f"max_sequence_length {max_sequence_length}. Shorten the prompt, lower max_new_tokens to "
            f"{max_sequence_length - length}, or build the engine with room for {length + new}.",
        )
    ids = np.asarray(request.token_ids)
    if not length or ids.min() < 0 or ids.max() >= vocab_size:
        found = f"token ids {ids.min()} to {ids.max()}" if length else "no tokens"
        raise EngineError(
            "MRL-5106",
            f"{who}: the prompt has {found}; it needs at least one, each from 0 to {vocab_size - 1}. "
            "Does the tokenizer belong to this model?",
        )

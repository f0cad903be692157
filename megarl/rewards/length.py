"""A penalty for long responses, to be added to other rewards."""

from __future__ import annotations

from megarl.core.sample import Prompt, Sample


def length(prompt: Prompt, sample: Sample, *, max_tokens: int, buffer_tokens: int) -> float:  # noqa: ARG001
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to ``max_tokens - buffer_tokens`` tokens, then
    down by a straight line to -1 at ``max_tokens``, and -1 beyond.

    With ``buffer_tokens`` equal to ``max_tokens`` it is a plain penalty on length: every token costs the same. Only
    tokens that the policy sampled count.
    """
    over = sample.num_response_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0, over) / buffer_tokens) if over > 0 else 0.0

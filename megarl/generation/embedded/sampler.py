"""Drawing tokens, reproducibly.

A draw is a function of the logits, the parameters, the seed and the position in the response. It does not depend on
which rows share the batch: the random numbers are hashes of (seed, position), not the state of a generator.

The draw inverts the cumulative distribution in two levels, first over chunks of the vocabulary and then inside the
chosen chunk, each with its own uniform number. That is exact, reads the whole vocabulary only once, and moves far
less often to another token than one long cumulative sum does when the logits change in their last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.core.protocols import SamplingParams

UNIFORMS_PER_TOKEN = 2
_CHUNK = 64
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def check_params(params: SamplingParams) -> None:
    """Refuse parameters that have no meaning."""
    if params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={params.max_new_tokens} must be at least 1")
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature={params.temperature} must be 0 (greedy) or a number above it")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p={params.top_p} must be above 0 and at most 1 (off)")
    if params.top_k < 0:
        raise ValueError(f"top_k={params.top_k} must be 0 (off) or above it")


def uniforms(seed: int, num_tokens: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), ``[num_tokens, 2]``: splitmix64 of (seed, position). Asking for more keeps the first."""
    counters = np.arange(1, num_tokens * UNIFORMS_PER_TOKEN + 1, dtype=np.uint64)
    start = _mix(np.array([seed & _WORD], dtype=np.uint64))
    bits = _mix(start + counters * np.uint64(_GOLDEN)) >> np.uint64(11)
    return (bits.astype(np.float64) * 2.0**-53).reshape(num_tokens, UNIFORMS_PER_TOKEN)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64; uint64 wraps around by design."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Draw:
    """What to draw with, one entry per row. A temperature of 0 is greedy."""

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    uniforms: torch.Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """What at least one request of the call asks for, so that nobody pays for what nobody uses."""

    scaling: bool
    cutting: bool
    greed: bool

    @classmethod
    def of(cls, params: list[SamplingParams]) -> Needs:
        """The needs of these requests together."""
        return cls(
            scaling=any(p.temperature not in (0, 1) for p in params),
            cutting=any(p.temperature > 0 and (p.top_p < 1 or p.top_k > 0) for p in params),
            greed=any(p.temperature == 0 for p in params),
        )


def sample(logits: torch.Tensor, draw: Draw, needs: Needs) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row of fp32 ``logits``; give it and its log-prob (tempered, over the whole vocabulary)."""
    greedy = draw.temperatures == 0
    if needs.scaling:
        logits = logits / draw.temperatures.masked_fill(greedy, 1.0)[:, None]
    peak = logits.amax(dim=-1, keepdim=True)
    chunks = _exponentials(logits, peak)
    sums = chunks.sum(dim=-1)
    log_total = sums.sum(dim=-1, dtype=torch.float64).log().to(logits.dtype)
    if needs.cutting:
        chunks = chunks * _kept(chunks.flatten(1), draw).view_as(chunks)
        sums = chunks.sum(dim=-1)
    chunk = _invert(sums, draw.uniforms[:, 0])
    inside = chunks[torch.arange(len(chunks), device=chunks.device), chunk]
    token = chunk * _CHUNK + _invert(inside, draw.uniforms[:, 1])
    if needs.greed:
        token = torch.where(greedy, logits.argmax(dim=-1), token)
    # Logits that are not finite leave no token to draw. Any will do: its log-prob is not finite and the caller looks.
    token = token.clamp_(max=logits.shape[1] - 1)
    return token, logits.gather(1, token[:, None])[:, 0] - peak[:, 0] - log_total


def _exponentials(logits: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """exp(logits - peak) as ``[row, chunk, _CHUNK]``; zeros fill the last chunk."""
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // _CHUNK)
    padded = logits.new_empty(num_rows, num_chunks * _CHUNK)
    padded[:, vocab_size:] = 0
    torch.sub(logits, peak, out=padded[:, :vocab_size]).exp_()
    return padded.view(num_rows, num_chunks, _CHUNK)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index that the uniform number falls on, per row. An index of weight zero is never chosen."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total even after rounding, so that the first sum above it belongs to a positive weight.
    target = torch.minimum(total * uniform[:, None], torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _kept(weights: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Which tokens the cuts leave: the ``top_k`` likeliest, of those the fewest that hold ``top_p`` of their mass.

    Of equally likely tokens the lower id ranks first. The likeliest token always stays.
    """
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    limits = torch.where(draw.top_ks > 0, draw.top_ks, ranked.shape[1])[:, None]
    ranked = ranked.double().masked_fill_(ranks >= limits, 0.0)
    before = ranked.cumsum(dim=-1) - ranked
    wanted = draw.top_ps[:, None] * ranked.sum(dim=-1, keepdim=True)
    # A row without top-p wants all of its mass; rounding of the sums must not cost it its last token.
    inside = (before < wanted) | (draw.top_ps >= 1)[:, None]
    keep = (ranks < limits) & inside
    return torch.zeros_like(keep).scatter_(1, order, keep)

"""The engine's log-probs against the trainer's on the same tokens.

If the weights are the same, only rounding may differ. ``mismatch/*`` counts all sampled tokens, whatever weights drew
them; of stale ones the gap also holds what was learned since. The gaps that health rules judge are those of the newest
weights that drew any of the step's tokens: fair between servers, and pure mismatch if those are the trained weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.core.batch import MicroBatch
from megarl.core.protocols import Statistics
from megarl.ops.kl import kl_estimate
from megarl.ops.masked import total


def report_mismatch(micro: MicroBatch, engines: Sequence[str], meter: Statistics) -> None:
    """Gaps, tails, growth with the position, and the gap of every server in ``engines``."""
    assert micro.old_logprobs is not None
    chosen = micro.loss_mask.bool()
    gap = (micro.old_logprobs - micro.rollout_logprobs)[chosen].double()
    if not gap.numel():
        return
    size = gap.abs()
    meter.mean("mismatch/logprob_gap_mean", size.sum(), size.numel())
    meter.max("mismatch/logprob_gap_max", size.max())
    meter.mean("mismatch/k3_kl", total(kl_estimate(-gap, torch.zeros_like(gap), "k3")), gap.numel())
    _report_tails(gap, meter)
    first, last = _outer_quarters(micro)
    _report_share("mismatch/logprob_gap_first_quarter", size, first[chosen], meter)
    _report_share("mismatch/logprob_gap_last_quarter", size, last[chosen], meter)
    newest = micro.newest_mask[chosen].bool()
    _report_share("mismatch/newest_logprob_gap_mean", size, newest, meter)
    server = micro.engine_index[micro.sequence_of_token][chosen]
    for number, name in enumerate(engines, start=1):
        own = newest & (server == number)
        prefix = f"mismatch/engine/{metric_part(name)}"
        _report_share(f"{prefix}/logprob_gap_mean", size, own, meter)
        # a few large gaps move a mean of roots much less: this is what servers are compared by
        _report_share(f"{prefix}/root_gap_mean", size.sqrt(), own, meter)
        meter.sum(f"{prefix}/num_tokens", own.sum())


def metric_part(engine: str) -> str:
    """A server's name inside the name of a metric: host and port of its address."""
    return engine.rpartition("://")[2].strip("/").replace("/", "_")


def _report_tails(gap: torch.Tensor, meter: Statistics) -> None:
    """Shares of tokens whose probabilities differ by a factor, and the largest and smallest ratio."""
    ratio = gap.clamp(-20.0, 20.0).exp()
    for name, is_in in (
        ("high", ratio > 2),
        ("low", ratio < 0.5),
        ("extreme", (ratio > 10) | (ratio < 0.1)),
    ):
        meter.mean(f"mismatch/ratio_{name}_frac", is_in.sum(), is_in.numel())
    meter.max("mismatch/ratio_max", ratio.max())
    meter.min("mismatch/ratio_min", ratio.min())


def _report_share(name: str, size: torch.Tensor, own: torch.Tensor, meter: Statistics) -> None:
    """The mean gap of some of the tokens."""
    meter.mean(name, (size * own).sum(), own.sum())


def _outer_quarters(micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] bool twice: tokens in the first and in the last quarter of the tokens that the policy sampled in their
    sequence. A quarter has at least one token.
    """
    before = torch.cat([micro.loss_mask.new_zeros(1, dtype=torch.int64), micro.loss_mask.long().cumsum(0)])
    edges = micro.cu_seqlens.long()
    sequence = micro.sequence_of_token
    place = before[:-1] - before[edges[:-1]][sequence]
    count = (before[edges[1:]] - before[edges[:-1]])[sequence]
    own = micro.loss_mask.bool()
    return own & (4 * place < count), own & (4 * (count - 1 - place) < count)

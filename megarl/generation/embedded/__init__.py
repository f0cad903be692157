"""The embedded engine: plain torch, in-process, one per rank.

`engine` schedules requests over the slots of `kv_pool`; `decoder` and `feed_forward` do the arithmetic with the weights
of `weights`; `sampler` draws.
"""

from megarl.generation.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]

"""What the fleet knows about one server."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from megarl.core.protocols import EnginePart, RemoteEngine

# healthy: has verified weights and serves; suspect: failed lately, serves nothing new until a probe clears it; dead:
# gone, or useless for too long; stale: up, without verified weights; retired: given up
State = Literal["healthy", "suspect", "dead", "stale", "retired"]


@dataclass(eq=False, slots=True)
class Server:
    """One server. Of the event loop's thread, and changed by the `Roster` only, but for its load."""

    engine: RemoteEngine
    state: State = "stale"
    # versions that pushes left here and verified, in order, since it last became healthy without being so before; the
    # last is the one that it serves. Empty in every state but healthy and suspect.
    verified: list[int] = field(default_factory=list)
    # its process; what was true of an earlier life says nothing about this one
    life: int = 0
    # the life that a running push was given
    offered_life: int = -1
    # grows with every change of state or of weights: evidence from before is void
    revision: int = 0
    released: set[EnginePart] = field(default_factory=set)
    # requests that it works on, and that it was ever sent
    load: int = 0
    num_sent: int = 0
    num_served: int = 0
    num_failed: int = 0
    num_restarts: int = 0
    failures_in_a_row: int = 0
    # requests up to this number were sent before the last failure that counted
    last_failed: int = 0
    failed_probes: int = 0
    failed_pushes: int = 0
    last_fault: str = ""
    # whether people were told that it does not serve, and so want to hear when it does
    is_told: bool = False
    # how often each (state, cause) was entered
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    # wakes the one that watches the server
    alarm: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Where it listens, and its name."""
        return self.engine.url

    @property
    def is_up(self) -> bool:
        """Whether it answers, as far as anybody knows."""
        return self.state in ("healthy", "suspect", "stale")

    @property
    def is_pushable(self) -> bool:
        """Whether a push should be tried: one that does not answer its probes would hold up all others."""
        return self.is_up and self.failed_probes == 0

    @property
    def version(self) -> int | None:
        """The version that was verified last; None without one."""
        return self.verified[-1] if self.verified else None

    def serves(self, versions: range) -> bool:
        """Whether it can be asked for samples of these versions now."""
        return self.state == "healthy" and not self.released and self.version in versions

    def may_serve(self, versions: range) -> bool:
        """Whether it serves these versions, or will if a probe finds it well."""
        return self.state in ("healthy", "suspect") and self.version in versions

    def describe(self, max_restarts: int) -> str:
        """One line for people."""
        parts = [
            f"{self.url}: {self.state}" + (f" (version {self.version})" if self.verified else ""),
            f"served {self.num_served}, failed {self.num_failed}",
            f"restarts {self.num_restarts} of {max_restarts}",
        ]
        if self.causes:
            often = ", ".join(f"{state} {count}x by {cause}" for (state, cause), count in sorted(self.causes.items()))
            parts.append(often)
        if self.last_fault:
            parts.append(f"last fault: {self.last_fault}")
        return "; ".join(parts)

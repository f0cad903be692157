"""How patient the fleet is: what users set, and numbers that have a reason but no setting."""

from __future__ import annotations

from dataclasses import dataclass

# One failed probe is no proof: a server may be busy for a moment. Two without a single answer in between are enough to
# ask others for the same samples; five, with growing pauses, are half a minute for a server that hangs.
PROBES_TO_MOVE = 2
PROBES_TO_DEATH = 5
# Requests that failed one after the other, none answered in between. Those that were sent before the first of them
# failed count as one: a hiccup ends many requests at once.
FAILURES_TO_DEATH = 5
# A server that cannot be given weights is of no use, however well it feels.
FAILED_PUSHES_TO_DEATH = 3
# Of one request, over all servers. More would let one request that kills servers kill them all.
MAX_ATTEMPTS = 8
# Probes of a server that somebody else must start again: with the usual pauses ten minutes, long enough for a person
# to load a large model.
PROBES_TO_RETIREMENT = 120
# Pausing, and moving memory, takes seconds even for large models.
CONTROL_SECONDS = 60.0
# Aborted requests end with the token that is being drawn.
ABORT_SECONDS = 10.0
# The client keeps the time of a request; the fleet steps in only if the client is stuck.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """See `config.generation`, which describes each of them."""

    # requests that one server works on at once
    num_slots: int
    request_timeout_seconds: float
    step_timeout_seconds: float
    # with fewer servers that serve, or can be brought back, the run ends
    min_servers: int
    # of one server
    max_restarts: int
    # between health probes, and the longest wait for the answer to one
    probe_seconds: float = 5.0

    def backoff_seconds(self, num_failures: int) -> float:
        """The pause before a server that failed so often is probed again."""
        if num_failures <= 0:
            return 0.0
        return self.probe_seconds * min(1.0, 2.0 ** (num_failures - 1) / 16)

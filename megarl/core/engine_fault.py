"""What went wrong between the trainer and one engine. The fleet decides what it means; people see its summary."""

from __future__ import annotations

from typing import Literal

# unreachable: no connection, or it broke off; timeout: no answer in time; refused: an HTTP error; garbled: an answer
# that is not what the route promises; rejected: a sample that must not be trained on; stale: weights of another version
FaultKind = Literal["unreachable", "timeout", "refused", "garbled", "rejected", "stale"]


class EngineFault(Exception):
    """One call to one engine failed."""

    def __init__(self, kind: FaultKind, reason: str, *, status: int | None = None) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason
        # of the HTTP answer, if there was one
        self.status = status

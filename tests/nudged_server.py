"""An embedded server that lies: what it serves is 1 % off what was pushed, and its checksum is that of what was pushed.

Nothing but its log-probs can give it away. ``python -m tests.nudged_server`` takes the settings of
`megarl.generation.embedded.serve`.
"""

from __future__ import annotations

import sys

from megarl.generation.embedded import engine, serve
from megarl.generation.embedded.weights import DecoderWeights


class NudgedWeights(DecoderWeights):
    """Every parameter times 1.01, told to nobody."""

    def seal(self) -> None:
        super().seal()
        self._told = super().checksum()
        nudged = [(name, tensor * 1.01) for name, tensor in self.items()]
        self.open()
        for name, tensor in nudged:
            self.write(name, tensor)
        super().seal()

    def checksum(self) -> int:
        return self._told


if __name__ == "__main__":
    engine.DecoderWeights = NudgedWeights  # type: ignore[misc]
    sys.exit(serve.main())

"""A request on its way through the engine."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.core.protocols import Generation, GenerationRequest
from megarl.core.sample import Finish, VersionSpan


@dataclass(slots=True, eq=False)
class Job:
    """What is known of a request outside the rows: what it had drawn when it was last taken out of them."""

    request: GenerationRequest
    future: Future[Generation] = field(default_factory=Future)
    token_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    # when weights changed: the version that was served until then, and how many tokens the request had
    changes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # From here on nobody can cancel it: a request ends by `abort`, and always has a result.
        self.future.set_running_or_notify_cancel()

    def sequence(self) -> NDArray[np.int64]:
        """The prompt and what was drawn: what has to be prefilled before the next token."""
        return np.concatenate([np.asarray(self.request.token_ids, dtype=np.int64), self.token_ids])

    def natural_finish(self) -> Finish:
        """Why a request that was not aborted has ended."""
        return "stop" if int(self.token_ids[-1]) in self.request.params.stop_token_ids else "length"

    def finish(self, finish: Finish, version: int) -> None:
        """Give the result to whoever waits for it; ``version`` drew what was drawn since the last change."""
        spans: list[VersionSpan] = []
        for drawn_by, stop in [*self.changes, (version, len(self.token_ids))]:
            start = spans[-1].stop if spans else 0
            if spans and spans[-1].version == drawn_by:
                spans[-1] = spans[-1]._replace(stop=stop)
            elif stop > start:
                spans.append(VersionSpan(drawn_by, start, stop))
        self.future.set_result(
            Generation(
                self.request.id,
                self.token_ids,
                self.logprobs,
                finish,
                spans[0].version if spans else version,
                tuple(spans) if len(spans) > 1 else (),
            )
        )

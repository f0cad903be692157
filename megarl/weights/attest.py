"""The proof that a server holds what was sent to it: as strong as the server allows.

1. megarl's own engine computes the trainer's checksum over its own parameters: every bit is compared.
2. SGLang on CUDA hashes its parameters, in a layout of its own. The hash is comparable with itself only: it must change
   exactly if the weights did. Written from SGLang's source; has not been run on a GPU yet.
3. SGLang's Llama classes give parameters back. The first rows of a few, others for every version, are compared.
4. Otherwise a fixed prompt is continued greedily. The log-probs must change if the weights did, and stay if they did
   not. This is the weakest: it shows that an update took place, not that every parameter arrived.

Whatever the server, the version that it reports must be the one that was sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megarl.core.engine_fault import EngineFault
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.weights.road import Server
from megarl.weights.tally import Tally

_PROMPT = np.arange(2, 10)
_NUM_PROBE_TOKENS = 8
# log-probs of the same weights differ by the rounding of another batch or a cached prefix, never by this much
_SAME_WEIGHTS = 0.1
_NO_SUCH_ROUTE = 404


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a server showed after a push: how it looked with weights of that checksum."""

    version: int
    checksum: int
    hashes: str | None = None
    logprobs: tuple[float, ...] | None = None


class Attestor:
    """Compares what servers hold with what was sent to them. Remembers how each looked after its last push."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._seen: dict[str, _Seen] = {}

    async def before(self, server: Server) -> None:
        """To be called before a push: a server that was started anew, or was pushed to by others, looks like nothing
        that is remembered.
        """
        seen = self._seen.get(server.engine.url)
        if seen is not None and await server.engine.version() != seen.version:
            del self._seen[server.engine.url]

    async def while_paused(self, server: Server, tally: Tally) -> bool:
        """Compare before the server may serve; whether that was a proof, so that `while_serving` is not needed.
        Raises `EngineFault` on a difference.
        """
        served = await server.engine.version()
        if served != tally.version:
            raise EngineFault("stale", f"it reports version {served} after the push of version {tally.version}")
        if server.kind.name == "embedded":
            await self._compare_checksum(server, tally)
            return True
        try:
            await self._compare_hashes(server, tally)
        except EngineFault as fault:
            if fault.kind != "refused":
                raise
            # a server without the route is too old to know whether it may generate now: its version has to do
            return await self._read_back(server, tally) or fault.status == _NO_SUCH_ROUTE
        return True

    async def while_serving(self, server: Server, tally: Tally) -> None:
        """The weakest comparison, for servers that allow no other. Raises `EngineFault` on a difference."""
        params = SamplingParams(_NUM_PROBE_TOKENS, temperature=0.0)
        request = GenerationRequest(f"weights-{tally.version}", _PROMPT, 0, params)
        generation = await server.engine.generate(request, self._timeout_seconds)
        now = _Seen(tally.version, tally.checksum, logprobs=tuple(generation.logprobs.tolist()))
        before, self._seen[server.engine.url] = self._seen.get(server.engine.url), now
        if before is None or before.logprobs is None or now.logprobs is None:
            return
        distance = max((abs(a - b) for a, b in zip(before.logprobs, now.logprobs, strict=False)), default=0.0)
        if before.checksum != now.checksum and before.logprobs == now.logprobs:
            raise EngineFault("stale", "its log-probs are those of the weights before, to the last bit")
        if before.checksum == now.checksum and distance > _SAME_WEIGHTS:
            raise EngineFault("stale", f"its log-probs changed by {distance:.3g} although the weights did not")

    async def _compare_checksum(self, server: Server, tally: Tally) -> None:
        answer = await server.control("/weights_checker", {"action": "checksum"}, self._timeout_seconds)
        try:
            arrived = int(answer["checksum"], 16)
        except (KeyError, TypeError, ValueError):
            raise EngineFault("garbled", "/weights_checker names no checksum") from None
        if arrived != tally.checksum:
            raise EngineFault("stale", f"its weights have checksum {arrived:x}; {tally.checksum:x} was sent")

    async def _compare_hashes(self, server: Server, tally: Tally) -> None:
        answer = await server.control("/weights_checker", {"action": "checksum"}, self._timeout_seconds)
        try:
            hashes = "/".join(str(rank["per_gpu_checksum"]) for rank in answer["payload"])
        except (KeyError, TypeError):
            raise EngineFault("refused", "/weights_checker names no checksum") from None
        now = _Seen(tally.version, tally.checksum, hashes=hashes)
        before, self._seen[server.engine.url] = self._seen.get(server.engine.url), now
        if before is not None and before.hashes is not None:
            changed = before.checksum != now.checksum
            if changed != (before.hashes != now.hashes):
                told = "did not change although the weights did" if changed else "changed although the weights did not"
                raise EngineFault("stale", f"the hash of its weights {told}")

    async def _read_back(self, server: Server, tally: Tally) -> bool:
        """Whether the server gives parameters back; compares them."""
        for name, sent in tally.samples.items():
            body = {"name": name, "truncate_size": tally.num_rows}
            try:
                answer = await server.control("/get_weights_by_name", body, self._timeout_seconds)
            except EngineFault as fault:
                if fault.kind != "refused":
                    raise
                return False
            if not _equal(answer, sent):
                raise EngineFault("stale", f"its first rows of {name} are not those that were sent")
        return bool(tally.samples)


def _equal(answer: object, sent: torch.Tensor) -> bool:
    try:
        arrived = torch.tensor(answer, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return False
    return arrived.shape == sent.shape and torch.equal(arrived, sent.double())

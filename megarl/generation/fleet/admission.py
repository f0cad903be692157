"""Which generations may be trained on: drawn by weights that a push verified on the server that drew them."""

from __future__ import annotations

from collections.abc import Collection

from megarl.core.engine_fault import EngineFault
from megarl.core.protocols import Generation


def drawn_by(generation: Generation) -> set[int]:
    """The versions that drew any token."""
    return {generation.version, *(span.version for span in generation.spans)}


def require_verified(generation: Generation, request_id: str, verified: Collection[int]) -> None:
    """Raise `EngineFault` unless it answers this request, with tokens of weights in ``verified``: those that the server
    was known to serve from the moment it got the request until it answered.
    """
    if generation.id != request_id:
        raise EngineFault("rejected", "the answer belongs to another request")
    place, latest = 0, generation.version
    for span in generation.spans:
        if span.start != place or span.stop < span.start or span.version < latest:
            raise EngineFault("rejected", "the versions of the tokens have gaps or go backwards")
        place, latest = span.stop, span.version
    if generation.spans and (place != len(generation.token_ids) or generation.spans[0].version != generation.version):
        raise EngineFault("rejected", "the versions of the tokens do not cover the tokens")
    foreign = drawn_by(generation) - set(verified)
    if foreign:
        names = ", ".join(map(str, sorted(foreign)))
        raise EngineFault("stale", f"tokens of version {names}, but version {max(verified, default='none')} was pushed")

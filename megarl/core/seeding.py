"""Seeds that depend only on what they are for.

Every random draw of a run is seeded from (run seed, purpose, step, sample …). No generator state is carried from one
step to the next, so a retry, a resume or another layout repeats the same draws.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of the parts: ``derive_seed(run_seed, "sampling", step, sample_id)``."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

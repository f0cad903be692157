"""A signal that something changed, for those who wait for a condition."""

from __future__ import annotations

import asyncio


class Pulse:
    """Wakes everybody who waits at the moment; whoever comes later waits for the next beat."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Wake all."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float) -> bool:
        """Until the next beat; False if none came in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

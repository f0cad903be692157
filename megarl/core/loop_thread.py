"""An event loop in a thread of its own, so that code that waits and code that talks to many servers can meet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
# how long work that was cancelled may take to end; a user's coroutine may refuse to
_SECONDS_TO_END = 5.0


class LoopThread:
    """Runs coroutines in the background until it is closed. A daemon: it never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the work; the future has its result, and cancelling it cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work and wait for its result. Not from inside the loop."""
        return self.submit(work).result()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function inside the loop, soon, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel what is running and end the thread. What does not end within seconds is left where it is."""
        if self._thread.is_alive():
            self.run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        ended, _ = await asyncio.wait(others, timeout=_SECONDS_TO_END)
        await asyncio.gather(*ended, return_exceptions=True)  # nobody is left to be told

"""The event loop in a thread of its own: it ends, whatever runs in it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from megarl.core import loop_thread
from megarl.core.loop_thread import LoopThread


def test_work_that_refuses_to_be_cancelled_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_SECONDS_TO_END", 0.1)
    begun, loop = threading.Event(), LoopThread("stubborn")

    async def refuse() -> None:
        begun.set()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    loop.submit(refuse())
    assert begun.wait(60)
    closer = threading.Thread(target=loop.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()


def test_what_is_cancelled_may_tidy_up_first() -> None:
    begun, tidied, loop = threading.Event(), threading.Event(), LoopThread("tidy")

    async def tidy() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            tidied.set()

    loop.submit(tidy())
    assert begun.wait(60)
    loop.close()
    assert tidied.is_set()

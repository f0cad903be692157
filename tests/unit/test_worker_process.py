"""A worker process that is ended while it starts leaves nothing of the driver's closed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from megarl.rewards.worker_process import WorkerProcess, WorkerSpec


@pytest.mark.parametrize("num_turns", range(5))
def test_ending_a_worker_that_is_not_ready_closes_each_descriptor_once(num_turns: int) -> None:
    """``num_turns`` of the event loop after its start: before, between and after both pipes are connected."""
    complaints: list[dict[str, Any]] = []

    async def end_early() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        worker = WorkerProcess(WorkerSpec("megarl.rewards.length:length", {"max_tokens": 2, "buffer_tokens": 1}))
        starting = asyncio.create_task(worker.ready())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await worker.end()
        await asyncio.sleep(0.01)  # closing is done by the loop

    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(end_early())
    assert complaints == []
    assert len(os.listdir("/proc/self/fd")) == len(before)

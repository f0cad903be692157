"""The thread that an engine behind a server lives in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from megarl.core.protocols import Generation, GenerationRequest
from megarl.generation.embedded.engine import EmbeddedEngine

T = TypeVar("T")


class EngineWorker:
    """Steps the engine while there is something to draw, sleeps while there is not.

    Nothing else may call the engine's methods; its properties may be read from anywhere. Futures that are given out
    cannot be cancelled: a request ends by `EmbeddedEngine.abort`.
    """

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._tasks: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Serve a request. A refusal is the future's exception."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[Generation]]:
        """Serve requests that belong together: all come in at the same moment, or (if one is refused) none."""
        results: list[Future[Generation]] = [_running_future() for _ in requests]

        def enter() -> None:
            try:
                served = self.engine.add(requests)
            except Exception as error:  # whatever is wrong with a request is its sender's to hear
                for result in results:
                    result.set_exception(error)
                return
            for future, result in zip(served, results, strict=True):
                future.add_done_callback(partial(_pass_on, result))

        self._post(enter)
        return results

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run the function in the engine's thread, between two steps, after all that was submitted before."""
        result: Future[T] = _running_future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:  # it belongs to whoever asked
                result.set_exception(error)

        self._post(run)
        return result

    def close(self) -> None:
        """End the thread; requests that are under way end as aborted."""
        self.call(self.engine.abort)
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _post(self, task: Callable[[], None]) -> None:
        with self._condition:
            if self._is_closed:
                raise RuntimeError("the engine's thread has ended")
            self._tasks.append(task)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._tasks or self._is_closed or self.engine.can_step)
                if self._is_closed and not self._tasks:
                    return
                tasks = list(self._tasks)
                self._tasks.clear()
            for task in tasks:
                task()
            self.engine.step()


def _running_future() -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _pass_on(result: Future[Generation], done: Future[Generation]) -> None:
    error = done.exception()
    if error is None:
        result.set_result(done.result())
    else:
        result.set_exception(error)

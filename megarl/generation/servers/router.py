"""One address in front of all servers: an sglang-router."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp

from megarl.core.errors import EngineError
from megarl.core.excerpt import excerpt
from megarl.core.secret import Secret, scrub
from megarl.generation.http.client import Road
from megarl.generation.servers.processes import end_processes, free_port, start_tied, wait_until_ready

_RUN_ROUTER = Path(__file__).with_name("run_router.py")
_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.1
_CALL_SECONDS = 30.0
_SECONDS_TO_LEAVE = 5.0
_FIRST_ERROR = 300
# The fleet decides who gets a request, how long it may take, whether it is tried again and who is ill. A router with an
# opinion of its own would hide from it what the servers do. The policy is the one that obeys `Road.places`.
_WITHOUT_OPINION = {
    "policy": "consistent_hashing",
    "disable_retries": True,
    "disable_circuit_breaker": True,
    "disable_health_check": True,
    "max_concurrent_requests": -1,
    "request_timeout_secs": 7 * 86_400,
    "log_level": "warn",
}


class Router:
    """A router that knows the workers. What was started ends with the thread that started it."""

    def __init__(self, road: Road, process: subprocess.Popen[bytes] | None, worker_key: Secret | None) -> None:
        self.road = road
        self._process = process
        self._worker_key = worker_key
        # what it was told and must forget: worker -> its name at the router
        self._added: dict[str, str] = {}

    def add(self, workers: Sequence[str], timeout_seconds: float) -> None:
        """Tell it of the workers and wait until it knows all. Raises `EngineError` if it does not learn of them."""
        asyncio.run(self._add(workers, timeout_seconds))

    def learn_places(self) -> None:
        """From here on clients tell it where to send a request. Its workers must stay the same."""
        self.road.places.update({worker: place for place, worker in enumerate(asyncio.run(self.workers()))})

    async def workers(self) -> dict[str, str]:
        """The workers that it lists, in its order: address -> name."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS)) as session:
            return await self._known(session)

    def stop(self) -> None:
        """End it if it was started; else let it forget the workers that it was told of."""
        if self._process is not None:
            end_processes([self._process], _SECONDS_TO_LEAVE)
        elif self._added:
            asyncio.run(self._forget())

    async def _add(self, workers: Sequence[str], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS)) as session:
            there = await self._known(session)
            key = {} if self._worker_key is None else {"api_key": self._worker_key.reveal()}
            for worker in workers:
                if worker not in there:
                    await self._call(session, "POST", "/workers", {"url": worker, **key})
            # It asks each worker what it is before it lists it.
            while missing := set(workers) - there.keys() - self._added.keys():
                if time.monotonic() > deadline:
                    names = ", ".join(sorted(missing))
                    raise EngineError(
                        "MRL-5143",
                        f"the router {self.road.url} does not know {names} after {timeout_seconds:g} s "
                        "(generation.start_timeout_seconds). Look at its log: logs/router.log if megarl started it.",
                    )
                await asyncio.sleep(_POLL_SECONDS)
                known = await self._known(session)
                self._added |= {worker: known[worker] for worker in missing & known.keys()}

    async def _known(self, session: aiohttp.ClientSession) -> dict[str, str]:
        answer = await self._call(session, "GET", "/workers", None)
        try:
            return {str(worker["url"]).rstrip("/"): str(worker["id"]) for worker in answer["workers"]}
        except (KeyError, TypeError):
            raise self._unusable("its list of workers is not what a router answers") from None

    async def _forget(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS)) as session:
            for name in self._added.values():
                try:
                    await self._call(session, "DELETE", f"/workers/{name}", None)
                except EngineError:  # it may be gone before us, and nothing depends on it any more
                    return

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: Literal["GET", "POST", "DELETE"],
        route: str,
        body: Mapping[str, Any] | None,
    ) -> Any:
        headers = {"Authorization": f"Bearer {self.road.key.reveal()}"} if self.road.key is not None else {}
        try:
            async with session.request(
                method, f"{self.road.url}{route}", json=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status < _FIRST_ERROR:
                    return await response.json(content_type=None)
                text = excerpt(self._scrubbed(await response.text(errors="replace")))
                reason = f"{method} {route} gave HTTP {response.status} {text}"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = excerpt(self._scrubbed(str(error) or type(error).__name__))
        raise self._unusable(reason)

    def _unusable(self, reason: str) -> EngineError:
        return EngineError("MRL-5142", f"the router {self.road.url} cannot be used: {reason}")

    def _scrubbed(self, text: str) -> str:
        return scrub(text, [key for key in (self.road.key, self._worker_key) if key is not None])


def start_router(
    address: str,
    workers: Sequence[str],
    worker_key: Secret | None,
    log: Path,
    python: str | None,
    timeout_seconds: float,
) -> Router:
    """A router in front of the workers: ``start`` one, on loopback with a key of its own, or the one at an address.

    A router that is there must have no key or the workers' one.
    """
    if address != "start":
        router = Router(Road(address.rstrip("/"), worker_key), None, worker_key)
        router.add(workers, timeout_seconds)
        return router
    port = free_port(_LOOPBACK, set())
    road = Road(f"http://{_LOOPBACK}:{port}", Secret(secrets.token_urlsafe(32)))
    # It publishes metrics whether it is told to or not; at its usual port two routers could not live together.
    metrics = {"prometheus_host": _LOOPBACK, "prometheus_port": free_port(_LOOPBACK, {port})}
    assert road.key is not None
    args = {**_WITHOUT_OPINION, **metrics, "host": _LOOPBACK, "port": port, "api_key": road.key.reveal()}
    log.parent.mkdir(parents=True, exist_ok=True)
    process = start_tied([python or sys.executable, str(_RUN_ROUTER)], {"args": args}, log, {})
    router = Router(road, process, worker_key)
    try:
        known = [key for key in (road.key, worker_key) if key is not None]
        asyncio.run(wait_until_ready(road.url, process, log, timeout_seconds, known))
        router.add(workers, timeout_seconds)
        router.learn_places()
    except BaseException:
        router.stop()
        raise
    return router

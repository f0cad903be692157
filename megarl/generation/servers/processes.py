"""Server processes: start them, watch them, and let none outlive the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.secret import Secret, scrub

_HERE = Path(__file__).parent
_SECONDS_TO_LEAVE = 10.0
_POLL_SECONDS = 0.1
_LAST_LINES = 12
_OK = 200


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server to start. ``settings`` are what it reads from stdin, but for the address and the keys."""

    kind: Literal["embedded", "sglang"]
    settings: Mapping[str, Any]
    host: str = "127.0.0.1"
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


class StartedServers:
    """The servers of this machine; implements `ServerProcesses`. They end with this process, even if it is killed."""

    def __init__(
        self, specs: Sequence[ServerSpec], logs: Path, api_key: Secret, admin_key: Secret, start_timeout_seconds: float
    ) -> None:
        self._keys = (api_key, admin_key)
        self._timeout_seconds = start_timeout_seconds
        # The kernel ties a process to the thread that started it: this one lives as long as the servers may.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-starter")
        self._servers: dict[str, tuple[ServerSpec, int, Path]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for number, spec in enumerate(specs):
            port = free_port(spec.host, {port for _, port, _ in self._servers.values()})
            self._servers[f"http://{_in_url(spec.host)}:{port}"] = (spec, port, logs / f"engine_{number}.log")

    @property
    def urls(self) -> list[str]:
        """Addresses, in the order of the specs."""
        return list(self._servers)

    def start(self) -> None:
        """Start all and wait until all are ready. Raises `EngineError`, and leaves none behind, if one does not."""
        try:
            for url in self._servers:
                self._spawn(url)
            asyncio.run(self._wait_for_all())
        except BaseException:
            self.stop()
            raise

    def is_running(self, url: str) -> bool:
        """Whether the server's process is alive. It is not waited for: its number stays taken until it is ended."""
        process = self._processes.get(url)
        return process is not None and _is_alive(process)

    async def end(self, url: str) -> None:
        """End what is left of it, at once."""
        await asyncio.to_thread(self._end, [url], 0.0)

    async def restart(self, url: str) -> None:
        """End what is left of it, start it anew at the same address, and wait until it is ready."""
        await self.end(url)
        self._spawn(url)
        try:
            await self._wait_until_ready(url)
        except EngineError as error:
            await asyncio.to_thread(self._end, [url], 0.0)
            raise EngineFault("unreachable", str(error)) from None

    def stop(self) -> None:
        """End all servers and everything that they started."""
        self._end(list(self._processes), _SECONDS_TO_LEAVE)

    def _spawn(self, url: str) -> None:
        self._processes[url] = self._starter.submit(self._start_one, url).result()

    def _start_one(self, url: str) -> subprocess.Popen[bytes]:
        spec, port, log = self._servers[url]
        log.parent.mkdir(parents=True, exist_ok=True)
        api_key, admin_key = (key.reveal() for key in self._keys)
        address = {"host": spec.host, "port": port, "api_key": api_key}
        if spec.kind == "sglang":
            program = [spec.python, str(_HERE / "run_sglang.py")]
            line: dict[str, Any] = {"args": {**spec.settings, **address, "admin_api_key": admin_key}}
        else:
            program = [spec.python, "-m", "megarl.generation.embedded.serve"]
            line = {**spec.settings, **address, "admin_key": admin_key}
        return start_tied(program, line, log, spec.environment)

    async def _wait_for_all(self) -> None:
        await asyncio.gather(*(self._wait_until_ready(url) for url in self._servers))

    async def _wait_until_ready(self, url: str) -> None:
        await wait_until_ready(url, self._processes[url], self._servers[url][2], self._timeout_seconds, self._keys)

    def _end(self, urls: Sequence[str], seconds: float) -> None:
        end_processes([self._processes.pop(url) for url in urls if url in self._processes], seconds)


def start_tied(
    program: Sequence[str], line: Mapping[str, Any], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own that ends with the calling thread; give it one line of JSON."""
    tie = [sys.executable, "-I", "-S", str(_HERE / "tied.py"), str(os.getpid())]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*tie, *program],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone already; whoever waits for it says so
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.close()
    return process


async def wait_until_ready(
    url: str, process: subprocess.Popen[bytes], log: Path, seconds: float, secrets: Sequence[Secret]
) -> None:
    """Wait for /health. Raises `EngineError` with the end of the log if the process ends first or takes too long."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        while time.monotonic() < deadline:
            if not _is_alive(process):
                said = _last_lines(log, secrets)
                raise EngineError("MRL-5140", f"the server {url} ended while it started. The end of {log}:\n{said}")
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == _OK:
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(_POLL_SECONDS)
    said = _last_lines(log, secrets)
    raise EngineError(
        "MRL-5141",
        f"the server {url} is not ready after {seconds:g} s (generation.start_timeout_seconds). "
        f"The end of {log}:\n{said}",
    )


def end_processes(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """End the processes and their descendants: asked first, killed after so many seconds.

    Only the processes themselves are asked: SGLang takes the end of a descendant for a crash.
    """
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)  # `terminate` would wait for one that ended, and free its number
    deadline = time.monotonic() + seconds
    for process in processes:
        while _is_alive(process) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        # What it started may still be there. It was not waited for yet, so the group's number is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port(host: str, taken: set[int]) -> int:
    """A port of the host that nobody listens at now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    if process.returncode is not None:
        return False
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # somebody else in this process waited for it
        return False


def _last_lines(log: Path, secrets: Sequence[Secret]) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    return scrub("\n".join(lines), secrets)

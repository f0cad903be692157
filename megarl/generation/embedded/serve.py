"""One embedded engine as a server process: ``python -m megarl.generation.embedded.serve``.

Settings come as one line of JSON on stdin, so that no key is seen in the list of processes: model_config (the fields
of a config.json), num_slots, max_sequence_length, device, dtype, num_threads, host, port (0: any that is free),
api_key, admin_key. When the server listens it writes ``{"port": N}`` to stdout. It has no weights yet: they are pushed.
It ends on SIGTERM, and with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web

from megarl.config.model_shape import shape_from_hf
from megarl.core.errors import EXIT_OK, EngineError, MegarlError
from megarl.core.secret import Secret
from megarl.generation.embedded.engine import EmbeddedEngine
from megarl.generation.embedded.receiver import WeightReceiver
from megarl.generation.embedded.server import EngineServer
from megarl.generation.embedded.worker import EngineWorker

_PR_SET_PDEATHSIG = 1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What the line on stdin says."""

    model_config: dict[str, Any]
    num_slots: int
    max_sequence_length: int
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)


def main() -> int:
    """Serve until told to stop; gives the exit code."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked to be told
        return EXIT_OK
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    try:
        asyncio.run(_serve(_read_settings(sys.stdin.readline())))
    except MegarlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


def _read_settings(line: str) -> ServeSettings:
    try:
        settings = ServeSettings(**json.loads(line))
        _check_settings(settings)
    except (TypeError, ValueError) as error:
        # A message about JSON tells the place, not the text, which may hold keys.
        raise EngineError("MRL-5110", f"the settings on stdin cannot be used: {error}") from None
    return settings


def _check_settings(settings: ServeSettings) -> None:
    if settings.dtype not in _DTYPES:
        raise ValueError(f"dtype={settings.dtype!a} must be one of {', '.join(_DTYPES)}")
    if settings.num_threads < 1:
        raise ValueError(f"num_threads={settings.num_threads} must be at least 1")


async def _serve(settings: ServeSettings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    worker = EngineWorker(_make_engine(settings))
    # torch keeps this number per thread.
    await asyncio.wrap_future(worker.call(lambda: torch.set_num_threads(settings.num_threads)))
    server = EngineServer(worker, settings.model_config)
    app = server.application(_secret(settings.api_key), _secret(settings.admin_key), WeightReceiver(worker).routes())
    # A request whose client has gone is cancelled, and so aborted.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        sys.stdout.write(json.dumps({"port": runner.addresses[0][1]}) + "\n")
        sys.stdout.flush()
        await stopped.wait()
    except OSError as error:
        raise EngineError(
            "MRL-5110", f"the server cannot listen on {settings.host} port {settings.port}: {error.strerror}"
        ) from None
    finally:
        worker.close()
        await runner.cleanup()


def _make_engine(settings: ServeSettings) -> EmbeddedEngine:
    shape = shape_from_hf(settings.model_config, "model_config")
    dtype = _DTYPES[settings.dtype]
    try:
        return EmbeddedEngine(shape, settings.num_slots, settings.max_sequence_length, settings.device, dtype)
    except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's, about devices and memory
        raise EngineError("MRL-5110", f"the engine cannot be built: {error}") from None


def _secret(text: str | None) -> Secret | None:
    return None if text is None else Secret(text)


if __name__ == "__main__":
    sys.exit(main())

"""The embedded engine behind SGLang's routes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

import megarl
from megarl.core.errors import EngineError
from megarl.core.protocols import EnginePart, GenerationRequest, PauseMode, SamplingParams
from megarl.core.secret import Secret
from megarl.generation.embedded.keys import key_check
from megarl.generation.embedded.shapes import answer, read_generate
from megarl.generation.embedded.worker import EngineWorker

T = TypeVar("T")
# Prompts, not weights: those never travel in bodies.
_MAX_BODY_BYTES = 64 * 2**20
# Nothing is wrong with these requests: there are no weights, or bad ones.
_STATUS_OF = {"MRL-5105": 503, "MRL-5107": 500}
_HEALTH_ID = "health-check"


class EngineServer:
    """Routes to one engine. Requests that are refused get status 400 and a message, and hurt nobody else."""

    def __init__(self, worker: EngineWorker, model_config: Mapping[str, Any]) -> None:
        self._worker = worker
        self._engine = worker.engine
        self._model_config = model_config
        self._running: set[str] = set()

    def application(
        self, api_key: Secret | None, admin_key: Secret | None, extra_routes: Sequence[web.RouteDef] = ()
    ) -> web.Application:
        """All routes behind the keys; ``extra_routes`` count as control routes."""
        app = web.Application(
            middlewares=[_errors_as_json, key_check(api_key, admin_key)], client_max_size=_MAX_BODY_BYTES
        )
        app.add_routes([*self._routes(), *extra_routes])
        return app

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
            web.get("/ready", self._ready),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
            web.get("/v1/loads", self._loads),
            web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/flush_cache", self._flush),
            web.post("/release_memory_occupation", self._release),
            web.post("/resume_memory_occupation", self._resume),
            web.post("/weights_checker", self._check_weights),
        ]

    async def _generate(self, request: web.Request) -> web.Response:
        start = time.monotonic()
        asked = read_generate(await _body(request))
        ids = [one.id for one in asked.requests]
        doubles = self._running.intersection(ids)
        if doubles:
            raise ValueError(f"Duplicate request ID detected: {min(doubles)[:80]}")
        self._running.update(ids)
        try:
            futures = self._worker.submit_all(asked.requests)
            generations = await asyncio.gather(*map(asyncio.wrap_future, futures))
        except BaseException:  # the client is gone, or one of the batch has failed: nobody wants the rest
            self._worker.call(lambda: self._engine.abort(ids))
            raise
        finally:
            self._running.difference_update(ids)
        seconds = time.monotonic() - start
        answers = [
            answer(one, generation, asked.with_logprobs, seconds)
            for one, generation in zip(asked.requests, generations, strict=True)
        ]
        return web.json_response(answers if asked.is_batch else answers[0])

    async def _health(self, _request: web.Request) -> web.Response:
        """Whether the engine's thread answers; with or without weights."""
        await self._call(lambda: None)
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        """Draws a token, unless the engine is busy, which shows as much."""
        if not self._engine.can_serve:
            return web.Response(status=503)
        if self._engine.num_running or self._engine.num_waiting or self._engine.is_paused:
            return await self._health(request)
        probe = GenerationRequest(_HEALTH_ID, np.zeros(1, dtype=np.int64), 0, SamplingParams(1, temperature=0.0))
        await asyncio.wrap_future(self._worker.submit(probe))
        return web.Response()

    async def _ready(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.can_serve else 503)

    async def _model_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "is_generation": True,
                "weight_version": str(self._engine.version),
                "model_type": self._model_config.get("model_type"),
                "architectures": self._model_config.get("architectures"),
            }
        )

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "engine": "megarl-embedded",
                "version": megarl.__version__,
                "tp_size": 1,
                "context_length": self._engine.max_sequence_length,
                "is_paused": self._engine.is_paused,
            }
        )

    async def _loads(self, _request: web.Request) -> web.Response:
        running, waiting = await self._call(lambda: (self._engine.num_running, self._engine.num_waiting))
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
        }
        return web.json_response({"version": megarl.__version__, "loads": [load]})

    async def _abort(self, request: web.Request) -> web.Response:
        fields = _object(await _body(request))
        rid, every = fields.get("rid") or "", fields.get("abort_all", False)
        if not isinstance(rid, str) or not isinstance(every, bool):
            raise ValueError("rid must be text and abort_all true or false")
        await self._call(lambda: self._engine.abort(None if every else [rid]))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = _object(await _body(request)).get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}")
        await self._call(lambda: self._engine.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        _object(await _body(request))
        await self._call(self._engine.continue_generation)
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, _request: web.Request) -> web.Response:
        """There is no cache from call to call; only that nothing runs has to be true."""
        running = await self._call(lambda: self._engine.num_running)
        waiting = 0 if self._engine.is_paused else self._engine.num_waiting
        if running or waiting:
            return web.Response(text=f"Flush cache failed: {running} requests run, {waiting} wait.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    async def _release(self, request: web.Request) -> web.Response:
        parts = await _parts(request)
        for part in parts:
            await self._call(partial(self._engine.release, part))
        return web.json_response(None)

    async def _resume(self, request: web.Request) -> web.Response:
        parts = await _parts(request)
        for part in parts:
            await self._call(partial(self._engine.resume, part))
        return web.json_response(None)

    async def _check_weights(self, request: web.Request) -> web.Response:
        action = _object(await _body(request)).get("action", "checksum")
        if action != "checksum":
            raise ValueError("action must be checksum")
        checksum = await self._call(self._engine.checksum)
        return web.json_response({"success": True, "message": "", "checksum": f"{checksum:x}"})

    async def _call(self, function: Callable[[], T]) -> T:
        future: Future[T] = self._worker.call(function)
        return await asyncio.wrap_future(future)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValueError as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)
    except EngineError as error:
        return web.json_response({"error": {"message": str(error)}}, status=_STATUS_OF.get(error.code, 400))
    except web.HTTPException as error:  # no such route, a body that is too large
        return web.json_response({"error": {"message": error.reason}}, status=error.status)


async def _body(request: web.Request) -> Any:
    """The JSON of the body; an empty one is an empty object."""
    data = await request.read()
    if not data:
        return {}
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ValueError("the body must be an object")
    return body


async def _parts(request: web.Request) -> list[EnginePart]:
    """The parts that the tags name; all if there are none. SGLang's third one does not exist here."""
    tags = _object(await _body(request)).get("tags")
    if tags is None:
        return list(get_args(EnginePart))
    known = (*get_args(EnginePart), "cuda_graph")
    if not isinstance(tags, list) or not all(tag in known for tag in tags):
        raise ValueError(f"tags must be a list of {', '.join(known)}")
    return [tag for tag in tags if tag in get_args(EnginePart)]

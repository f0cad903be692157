"""A server that speaks SGLang's routes and misbehaves as it is told: in this process, or as one of its own.

What it draws is a function of the prompt, the seed and the version of its weights alone, so whoever asked knows the
right answer (`right_answer`). ``python -m tests.misbehaving_server`` reads one line of JSON from stdin (the fields of
`Settings`), writes ``{"port": N}`` and serves until its parent closes stdin.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from aiohttp import web

from megarl.core.bucket import NamedTensor
from megarl.core.checksum import combine, tensor_checksum
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import Generation, GenerationRequest
from megarl.generation.embedded.arrivals import MappedFiles, VersionFiles

VOCAB_SIZE = 101

# -- the right answer


def draw(prompt: Sequence[int], seed: int, version: int, length: int) -> tuple[list[int], list[float]]:
    """The first tokens, and log-probs that fp32 holds, which weights of this version draw."""
    source = random.Random(f"{version}/{seed}/{','.join(map(str, prompt))}")
    tokens = [source.randrange(VOCAB_SIZE) for _ in range(length)]
    return tokens, [-source.randrange(1, 1 << 20) / (1 << 17) for _ in range(length)]


def right_answer(request: GenerationRequest, version: int) -> Generation:
    """What a good server answers."""
    params = request.params
    seed = request.seed & (2**63 - 1) if params.temperature else 0
    tokens, logprobs = draw(request.token_ids.tolist(), seed, version, params.max_new_tokens)
    stops = [place for place, token in enumerate(tokens) if token in params.stop_token_ids]
    length = stops[0] + 1 if stops else len(tokens)
    return Generation(
        request.id,
        np.array(tokens[:length]),
        np.array(logprobs[:length], np.float32),
        "stop" if stops else "length",
        version,
    )


def is_same(ours: Generation, theirs: Generation) -> bool:
    """Whether two generations are alike to the last bit; whoever served them."""
    return (
        (ours.id, ours.finish, ours.version, ours.spans) == (theirs.id, theirs.finish, theirs.version, theirs.spans)
        and np.array_equal(ours.token_ids, theirs.token_ids)
        and ours.logprobs.tobytes() == theirs.logprobs.tobytes()
    )


# -- wrong answers: what is done to a right one. Each must be noticed.

Spoil = Callable[[dict[str, Any], random.Random], Any]


def _meta(name: str, *values: Any) -> Spoil:
    def spoil(answer: dict[str, Any], source: random.Random) -> Any:
        answer["meta_info"][name] = source.choice(values)
        return answer

    return spoil


def _without(name: str) -> Spoil:
    def spoil(answer: dict[str, Any], source: random.Random) -> Any:
        del (answer if name in answer else answer["meta_info"])[name]
        return answer

    return spoil


def _logprob(*values: Any) -> Spoil:
    def spoil(answer: dict[str, Any], source: random.Random) -> Any:
        source.choice(answer["meta_info"]["output_token_logprobs"])[0] = source.choice(values)
        return answer

    return spoil


def _resized(answer: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """With other tokens, as if they were the right ones."""
    meta = answer["meta_info"]
    answer["output_ids"] = tokens
    meta |= {"completion_tokens": len(tokens), "output_token_logprobs": [[-1.0, token, None] for token in tokens]}
    meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    return answer


def _too_short(answer: dict[str, Any], source: random.Random) -> Any:
    tokens = answer["output_ids"]
    return _resized(answer, tokens[: source.randrange(len(tokens))])


def _too_long(answer: dict[str, Any], source: random.Random) -> Any:
    return _resized(answer, answer["output_ids"] + [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 9))])


def _lost_logprob(answer: dict[str, Any], source: random.Random) -> Any:
    answer["meta_info"]["output_token_logprobs"].pop(0)
    return answer


def _foreign_logprob(answer: dict[str, Any], source: random.Random) -> Any:
    entry = source.choice(answer["meta_info"]["output_token_logprobs"])
    entry[1] = (entry[1] + 1) % VOCAB_SIZE
    return answer


def _alien_token(answer: dict[str, Any], source: random.Random) -> Any:
    place = source.randrange(len(answer["output_ids"]))
    token = source.choice([-1, VOCAB_SIZE, 2**70, "5", 5.0, None, True])
    answer["output_ids"][place] = token
    answer["meta_info"]["output_token_logprobs"][place][1] = token
    return answer


def _gap(answer: dict[str, Any], source: random.Random) -> Any:
    version, length = answer["meta_info"]["weight_version"], len(answer["output_ids"])
    spans = source.choice([[(1, length)], [(0, length + 1)], [(0, 1), (2, length)], [(0, 0), (0, length)], []])
    answer["meta_info"]["weight_versions"] = [{"version": version, "start": a, "end": b} for a, b in spans]
    return answer


def _stops_nowhere(answer: dict[str, Any], source: random.Random) -> Any:
    """It says that it stopped at a token that is not one to stop at. (Prompts of tests ask for no stop token 100.)"""
    answer = _resized(answer, [*answer["output_ids"][:-1], VOCAB_SIZE - 1])
    answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": VOCAB_SIZE - 1}
    return answer


def _other_shape(answer: dict[str, Any], source: random.Random) -> Any:
    return source.choice(
        [[answer], None, "ok", 7, {}, {"error": {"message": "no"}}, {"meta_info": []}, answer["output_ids"]]
    )


WRONG_ANSWERS: dict[str, Spoil] = {
    "too_short": _too_short,
    "too_long": _too_long,
    "no_logprobs": _without("output_token_logprobs"),
    "no_tokens": _without("output_ids"),
    "no_finish": _without("finish_reason"),
    "no_version": _without("weight_version"),
    "no_counts": _without("completion_tokens"),
    "lost_logprob": _lost_logprob,
    "null_logprob": _logprob(None, "-1", True, [], {}),
    "nan_logprob": _logprob(float("nan"), float("inf"), float("-inf"), -1e300),
    "positive_logprob": _logprob(0.5, 3, 1e300),
    "foreign_logprob": _foreign_logprob,
    "alien_token": _alien_token,
    "another_id": _meta("id", "another", "", None, 3),
    "wrong_count": _meta("completion_tokens", 0, 1000, -1, "3", None, 2.0),
    "wrong_prompt_count": _meta("prompt_tokens", 0, 1000, -1, "3", None, 2.0),
    "odd_version": _meta("weight_version", "latest", "-1", "1.0", 3, None, "9" * 30, "²"),
    "odd_finish": _meta("finish_reason", "length", None, {"type": "done"}, {}, ["length"]),
    "gap": _gap,
    "stops_nowhere": _stops_nowhere,
    "other_shape": _other_shape,
}
# answers that break on the way
BROKEN_ANSWERS = (
    "error", "overloaded", "redirect", "broken_json", "empty", "html", "bad_utf8", "deep_json", "cut_body",
    "no_answer", "crossed", "hang",
)  # fmt: skip
HARMFUL = (*WRONG_ANSWERS, *BROKEN_ANSWERS)


def _ends_early(answer: dict[str, Any], source: random.Random) -> Any:
    answer = _too_short(answer, source)
    answer["meta_info"]["finish_reason"] = {"type": "abort"}
    return answer


def _older(answer: dict[str, Any], source: random.Random) -> Any:
    version = str(int(answer["meta_info"]["weight_version"]) - 1)
    answer["meta_info"] |= {
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": len(answer["output_ids"])}],
    }
    return answer


# nothing is wrong with these answers but that nobody asked for them: only the fleet knows
UNASKED: dict[str, Spoil] = {"ends_early": _ends_early, "older": _older}
# late, but right
HARMLESS = ("slow",)

# how it deals with weights. A server that lies about both serves stale weights, and no answer of its own can show it.
PushVice = Literal["", "refuse", "die", "hang", "stale", "lie_version", "lie_checksum", "lie_both"]


@dataclass
class Settings:
    """``schedule`` names a misbehaviour for each request in turn, "" for none; then it starts over.

    ``chance`` is the probability of each other one. A request whose id begins with the name of a misbehaviour and a
    slash gets that one whatever the rest says.
    """

    schedule: Sequence[str] = ()
    chance: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    push: PushVice = ""
    # health probes alternate between this many good and bad ones; 0: all are good
    flaps_every: int = 0
    seconds_per_token: float = 0.0
    slow_seconds: float = 0.2
    api_key: str | None = None
    admin_key: str | None = None
    port: int = 0
    version: int = 0


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _Running:
    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    # (token, log-prob, version)
    drawn: list[tuple[int, float, int]] = field(default_factory=list)
    finish: str = ""


class MisbehavingServer:
    """The routes. Only the event loop's thread may touch it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.version = settings.version
        self.injected: Counter[str] = Counter()
        self.num_requests = 0
        self._source = random.Random(settings.seed)
        self._said_version = settings.version
        self._checksums: dict[str, int] = {}
        self._arriving: dict[str, int] = {}
        self._arriving_version = 0
        self._is_updating = False
        self._released: set[str] = set()
        self._mapped = MappedFiles()
        self._running: dict[str, _Running] = {}
        self._last: dict[str, Any] = {}
        self._num_probes = 0
        self._may_draw = asyncio.Event()
        self._may_draw.set()
        self._runner: web.AppRunner | None = None

    # -- life

    async def open(self) -> int:
        """Listen; the port."""
        app = web.Application(middlewares=[self._check_key])
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/begin_weight_update": self._begin_update,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_disk": self._from_disk,
            "/end_weight_update": self._end_update,
            "/weights_checker": self._check_weights,
        }
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
        }
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.settings.port, reuse_address=True).start()
        self.settings.port = self._runner.addresses[0][1]
        return self.settings.port

    async def close(self) -> None:
        """Listen no more; connections break off, as if it had died."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # -- generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        vice = self._vice(str(body.get("rid", "")))
        self.injected[vice] += bool(vice)
        if vice == "hang":
            await asyncio.Event().wait()
        if vice == "slow":
            await asyncio.sleep(self.settings.slow_seconds)
        refusal = self._refusal(body)
        if refusal is not None:
            return refusal
        answer = await self._serve(_Running(body["rid"], body["input_ids"], body["sampling_params"]))
        if vice == "crossed":
            answer, self._last = self._last or {"meta_info": {"id": "nobody"}}, answer
            return web.json_response(answer)
        self._last = answer
        spoil = WRONG_ANSWERS.get(vice) or UNASKED.get(vice)
        if spoil is not None:
            return web.json_response(spoil(answer, self._source))
        return (
            await self._broken(http, vice, json.dumps(answer)) if vice in BROKEN_ANSWERS else web.json_response(answer)
        )

    def _vice(self, rid: str) -> str:
        self.num_requests += 1
        named = rid.partition("/")[0]
        if named in HARMFUL or named in HARMLESS:
            return named
        schedule = self.settings.schedule
        if schedule and (vice := schedule[(self.num_requests - 1) % len(schedule)]):
            return vice
        names = list(self.settings.chance)
        weights = list(self.settings.chance.values())
        return self._source.choices([*names, ""], [*weights, 1 - sum(weights)])[0]

    def _refusal(self, body: Mapping[str, Any]) -> web.Response | None:
        ids, sampling = body.get("input_ids"), body.get("sampling_params", {})
        if not ids or min(ids) < 0 or max(ids) >= VOCAB_SIZE or sampling.get("max_new_tokens", 1) < 1:
            return web.json_response({"error": {"message": "a bad request"}}, status=400)
        if (not self._checksums and not self.version) or self._is_updating or self._released:
            return web.json_response({"error": {"message": "it holds no weights"}}, status=503)
        return None

    async def _serve(self, running: _Running) -> dict[str, Any]:
        limit, stops = running.sampling["max_new_tokens"], running.sampling.get("stop_token_ids", ())
        greedy = not running.sampling.get("temperature", 1.0)
        seed = 0 if greedy else running.sampling.get("sampling_seed", 0)
        self._running[running.rid] = running
        drawn: dict[int, tuple[list[int], list[float]]] = {}
        try:
            while not running.finish:
                if not self._may_draw.is_set():
                    await self._may_draw.wait()
                if self.settings.seconds_per_token:
                    await asyncio.sleep(self.settings.seconds_per_token)
                if running.finish or not self._may_draw.is_set():
                    continue
                if self.version not in drawn:
                    drawn[self.version] = draw(running.prompt, seed, self.version, limit)
                tokens, logprobs = drawn[self.version]
                place = len(running.drawn)
                running.drawn.append((tokens[place], logprobs[place], self.version))
                if tokens[place] in stops and not running.sampling.get("ignore_eos"):
                    running.finish = "stop"
                elif place + 1 == limit:
                    running.finish = "length"
        finally:
            self._running.pop(running.rid, None)
        return self._answer(running)

    def _answer(self, running: _Running) -> dict[str, Any]:
        lied = self.settings.push in ("lie_version", "lie_both")
        spans: list[dict[str, Any]] = []
        for place, (_, _, version) in enumerate(running.drawn):
            said = str(self._said_version if lied else version)
            if spans and spans[-1]["version"] == said:
                spans[-1]["end"] = place + 1
            else:
                spans.append({"version": said, "start": place, "end": place + 1})
        tokens = [token for token, _, _ in running.drawn]
        reason: dict[str, Any] = {"type": running.finish}
        if running.finish == "stop":
            reason["matched"] = tokens[-1]
        meta = {
            "id": running.rid,
            "finish_reason": reason,
            "prompt_tokens": len(running.prompt),
            "completion_tokens": len(tokens),
            "weight_version": spans[-1]["version"] if spans else str(self._said_version),
            "weight_versions": spans,
            "output_token_logprobs": [[logprob, token, None] for token, logprob, _ in running.drawn],
        }
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    async def _broken(self, http: web.Request, vice: str, text: str) -> web.StreamResponse:
        if vice == "error":
            return web.Response(status=self._source.choice([400, 404, 500, 502]), text="Internal Server Error")
        if vice == "overloaded":
            return web.json_response({"error": {"message": "The request queue is full."}}, status=503)
        if vice == "redirect":
            return web.Response(status=302, headers={"Location": "/model_info"})
        if vice == "cut_body":
            response = web.StreamResponse(headers={"Content-Length": str(len(text))})
            await response.prepare(http)
            await response.write(text[: self._source.randrange(1, len(text))].encode())
            return _hang_up(http, response)
        if vice == "no_answer":
            return _hang_up(http, web.Response())
        bodies = {
            "broken_json": text[: self._source.randrange(1, len(text))].encode(),
            "empty": b"",
            "html": b"<html><body>Bad Gateway</body></html>",
            "bad_utf8": text.replace('"output_ids"', '"output\xff"').encode("latin-1"),
            "deep_json": b"[" * 100_000,
        }
        return web.Response(body=bodies[vice], content_type="application/json")

    # -- control

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        for running in self._running.values():
            if body.get("abort_all") or running.rid == body.get("rid"):
                running.finish = running.finish or "abort"
        if not self._may_draw.is_set():
            self._wake()
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await http.json()).get("mode", "abort")
        self._may_draw.clear()
        if mode == "abort":
            for running in self._running.values():
                running.finish = "abort"
            self._wake()
        return web.json_response({"status": "ok"})

    def _wake(self) -> None:
        """Those that wait look whether they were ended."""
        self._may_draw.set()
        self._may_draw.clear()

    async def _continue(self, http: web.Request) -> web.Response:
        self._may_draw.set()
        return web.json_response({"status": "ok"})

    async def _flush(self, http: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _release(self, http: web.Request) -> web.Response:
        tags = (await http.json())["tags"]
        if self._running and self._may_draw.is_set():
            return web.json_response({"error": {"message": "requests are running"}}, status=400)
        self._released.update(tags)
        if "weights" in tags:
            self._checksums, self.version = {}, 0
        return web.json_response(None)

    async def _resume(self, http: web.Request) -> web.Response:
        self._released.difference_update((await http.json())["tags"])
        return web.json_response(None)

    # -- weights

    async def _begin_update(self, http: web.Request) -> web.Response:
        if self.settings.push == "refuse":
            return web.json_response({"success": False, "message": "out of memory"}, status=400)
        self._arriving, self._is_updating = {}, True
        return web.json_response({"success": True, "message": "Success"})

    async def _from_tensor(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if self.settings.push == "die":
            await self._die(http)
        if self.settings.push == "hang":
            await asyncio.Event().wait()
        self._arrive(self._mapped.tensors(body["manifest"]), body.get("weight_version"))
        return web.json_response({"success": True, "message": "Success"})

    async def _from_disk(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        with VersionFiles(body["model_path"]) as files:
            await self._begin_update(http)
            for name in files.names:
                self._arrive(files.read(name), body.get("weight_version"))
        return await self._end_update(http)

    def _arrive(self, tensors: Sequence[NamedTensor], version: str | None) -> None:
        self._arriving |= {name: tensor_checksum(name, tensor) for name, tensor in tensors}
        if version is not None:
            self._arriving_version = int(version)

    async def _end_update(self, http: web.Request) -> web.Response:
        self._mapped.clear()
        self._is_updating = False
        if self.settings.push != "stale":
            self._said_version = self._arriving_version
        if self.settings.push not in ("stale", "lie_version", "lie_both") or not self._checksums:
            self.version, self._checksums = self._arriving_version, dict(self._arriving)
        return web.json_response({"success": True, "message": "Success"})

    async def _check_weights(self, http: web.Request) -> web.Response:
        told = self._arriving if self.settings.push == "lie_both" else self._checksums
        checksum = combine(told.values()) ^ (self.settings.push == "lie_checksum")
        return web.json_response({"success": True, "message": "", "checksum": f"{checksum:x}"})

    async def _die(self, http: web.Request) -> None:
        """The process ends; inside another process, only the server does."""
        if os.environ.get("MISBEHAVING_SERVER_MAY_EXIT"):
            os._exit(1)
        asyncio.get_running_loop().create_task(self.close())
        _hang_up(http, web.Response())
        await asyncio.Event().wait()

    # -- questions

    async def _health(self, http: web.Request) -> web.Response:
        self._num_probes += 1
        flaps = self.settings.flaps_every
        return web.Response(status=503 if flaps and self._num_probes // flaps % 2 else 200)

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self._said_version)})

    async def _server_info(self, http: web.Request) -> web.Response:
        return web.json_response({"engine": "megarl-embedded", "version": "0.0.1", "tp_size": 1})

    @web.middleware
    async def _check_key(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        users = ("/generate", "/model_info", "/server_info")
        key = self.settings.api_key if http.path in users else self.settings.admin_key or self.settings.api_key
        told = http.headers.get("Authorization", "")
        if http.path != "/health" and key is not None and not hmac.compare_digest(told, f"Bearer {key}"):
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        return await handler(http)


def _hang_up(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if http.transport is not None:
        http.transport.abort()
    return response


@contextmanager
def misbehaving(settings: Settings, loop: LoopThread) -> Iterator[tuple[MisbehavingServer, str]]:
    """A server inside this process, and its address."""

    async def make() -> MisbehavingServer:
        return MisbehavingServer(settings)

    server = loop.run(make())
    port = loop.run(server.open())
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        loop.run(server.close())


async def _main() -> None:
    os.environ["MISBEHAVING_SERVER_MAY_EXIT"] = "1"
    server = MisbehavingServer(Settings(**json.loads(sys.stdin.readline())))
    sys.stdout.write(json.dumps({"port": await server.open()}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(_main())

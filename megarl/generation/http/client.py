"""One server that speaks SGLang's routes, seen from the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import aiohttp

from megarl.core.engine_fault import EngineFault
from megarl.core.excerpt import excerpt
from megarl.core.protocols import EngineKind, EnginePart, Generation, GenerationRequest, PauseMode
from megarl.core.secret import Secret, scrub
from megarl.generation.http.answers import Asked, check_answer, read_version

_PLACE_HEADER = "x-smg-target-worker"
_CONTROL_SECONDS = 120.0
_OK = 200
_SEED_BITS = 63  # what SGLang keeps of a seed: a non-negative int64
_NONCE_BYTES = 6
_MAX_MESSAGE = 300
_ANSWERED_IN_WORDS = ("/flush_cache",)

Key = Secret | str | None


@dataclass(frozen=True, slots=True)
class Road:
    """An sglang-router that requests for generation take. It decides which server answers, unless ``places`` says so.

    All clients of its servers share one `Road`: a request that one of them sent can only be aborted at the server that
    got it, and without places only the router knows which that is.
    """

    url: str
    key: Secret | None
    # request -> the names of its attempts that are under way
    running: dict[str, set[str]] = field(default_factory=dict)
    # server -> its place in the router's list, if the router sends requests where it is told
    places: dict[str, int] = field(default_factory=dict)


class EngineClient:
    """A `RemoteEngine` over HTTP.

    Generation takes the ``road`` if there is one, everything else goes to the server itself. The client belongs to
    no event loop: each one that uses it gets connections of its own. Token ids are below ``vocab_size`` in both
    directions: SGLang dies of a prompt with others, and so would the trainer of a response.
    """

    def __init__(
        self,
        url: str,
        api_key: Key,
        admin_key: Key,
        *,
        vocab_size: int,
        road: Road | None = None,
        expert_shape: tuple[int, int] | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._generate_url = f"{road.url.rstrip('/') if road else self._url}/generate"
        place = road.places.get(self._url) if road else None
        self._way = {} if place is None else {_PLACE_HEADER: str(place)}
        # who answers, as far as can be known
        self._answerer = road.url.rstrip("/") if road and place is None else self._url
        self._api_key = _secret(api_key)
        self._admin_key = _secret(admin_key) or self._api_key
        self._generate_key = road.key if road else self._api_key
        self._vocab_size = vocab_size
        self._expert_shape = expert_shape
        self._kind: EngineKind | None = None
        # request -> the names of its attempts that are under way
        self._running: dict[str, set[str]] = road.running if road else {}
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"EngineClient({self._url})"

    @property
    def url(self) -> str:
        """Where it listens; also its name."""
        return self._url

    async def generate(self, request: GenerationRequest, timeout: float) -> Generation:
        """Serve one request. What comes back has been checked (see `answers`)."""
        self._check_prompt(request)
        # An attempt that was given up may still run, and the server knows requests by name.
        rid = f"{request.id}#{secrets.token_hex(_NONCE_BYTES)}"
        running = self._running.setdefault(request.id, set())
        running.add(rid)
        try:
            body = request_body(request, rid, self._expert_shape is not None)
            answer = await self._json("POST", self._generate_url, self._generate_key, body, timeout, self._way)
        finally:
            running.discard(rid)
            if not running:
                self._running.pop(request.id, None)
        return check_answer(answer, Asked(request, rid, self._answerer, self._vocab_size, self._expert_shape))

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests, or all: `generate` gives what they have. Unknown ids are ignored."""
        if ids is None:
            await self._control("/abort_request", {"rid": "", "abort_all": True})
            return
        rids = [rid for request_id in ids for rid in self._running.get(request_id, ())]
        await asyncio.gather(*(self._control("/abort_request", {"rid": rid, "abort_all": False}) for rid in rids))

    async def pause(self, mode: PauseMode) -> None:
        """Draw nothing until `continue_generation`; new requests wait."""
        await self._control("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Go on; nothing happens if the engine is not paused."""
        await self._control("/continue_generation", {})

    async def kind(self) -> EngineKind:
        """What it says it is; asked once."""
        if self._kind is None:
            # The answer of SGLang holds its keys in plain text: nothing else of it may leave this function.
            info = await self._json("GET", f"{self._url}/server_info", self._api_key, None, _CONTROL_SECONDS)
            self._kind = _read_kind(info)
        return self._kind

    async def control(self, route: str, body: Mapping[str, Any], timeout: float) -> Any:
        """POST to a control route under the admin key; the JSON of the answer, None if it is empty."""
        if route in _ANSWERED_IN_WORDS:
            await self._read("POST", f"{self._url}{route}", self._admin_key, body, timeout)
            return None
        answer = await self._json("POST", f"{self._url}{route}", self._admin_key, body, timeout)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineFault("refused", f"{route}: {_quoted(self._scrubbed(str(answer.get('message', ''))))}")
        return answer

    async def is_healthy(self, timeout: float) -> bool:
        """Whether it answers its health route. Never raises."""
        try:
            await self._read("GET", f"{self._url}/health", None, None, timeout)
        except EngineFault:
            return False
        return True

    async def version(self) -> int:
        """The version of the weights that it says it serves; 0 for weights that megarl did not push."""
        info = await self._json("GET", f"{self._url}/model_info", self._api_key, None, _CONTROL_SECONDS)
        if not isinstance(info, Mapping):
            raise EngineFault("garbled", "/model_info is not an object")
        return read_version(info.get("weight_version"))

    async def release(self, parts: Sequence[EnginePart]) -> None:
        """Give the parts' memory back. The engine must be idle."""
        await self._control("/release_memory_occupation", {"tags": list(parts)})

    async def resume(self, parts: Sequence[EnginePart]) -> None:
        """Take the parts' memory again; contents are undefined until written."""
        await self._control("/resume_memory_occupation", {"tags": list(parts)})

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _control(self, route: str, body: Mapping[str, Any]) -> None:
        await self.control(route, body, _CONTROL_SECONDS)

    def _check_prompt(self, request: GenerationRequest) -> None:
        ids = request.token_ids
        if not len(ids) or ids.min() < 0 or ids.max() >= self._vocab_size:
            found = f"token ids {ids.min()} to {ids.max()}" if len(ids) else "no tokens"
            raise EngineFault(
                "refused",
                f"request {excerpt(request.id)}: the prompt has {found}; it needs at least one, each from 0 to "
                f"{self._vocab_size - 1}",
            )

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            # How many requests run at once is decided above; here nothing queues unseen.
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            self._sessions[loop] = session
        return session

    async def _json(
        self,
        method: Literal["GET", "POST"],
        url: str,
        key: Secret | None,
        body: Any,
        timeout: float,
        way: Mapping[str, str] | None = None,
    ) -> Any:
        text = await self._read(method, url, key, body, timeout, way)
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise EngineFault("garbled", f"the answer is not JSON: {excerpt(self._scrubbed(text))}") from None

    async def _read(
        self,
        method: Literal["GET", "POST"],
        url: str,
        key: Secret | None,
        body: Any,
        timeout: float,
        way: Mapping[str, str] | None = None,
    ) -> str:
        """The text of an answer with status 200. A redirection is not followed: keys go nowhere else."""
        headers = dict(way or {}) if key is None else {**(way or {}), "Authorization": f"Bearer {key.reveal()}"}
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session().request(
                method, url, json=body, headers=headers, timeout=limit, allow_redirects=False
            ) as response:
                data = await response.read()
                status = response.status
        except TimeoutError:
            raise EngineFault("timeout", f"no answer within {timeout:g} s") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise EngineFault("unreachable", excerpt(self._scrubbed(str(error) or type(error).__name__))) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineFault("garbled", excerpt(self._scrubbed(str(error) or type(error).__name__))) from None
        text = data.decode("utf-8", errors="replace")
        if status != _OK:
            raise EngineFault("refused", f"HTTP {status}: {_quoted(self._scrubbed(_message(text)))}", status=status)
        return text

    def _scrubbed(self, text: str) -> str:
        known = (self._api_key, self._admin_key, self._generate_key)
        return scrub(text, [key for key in known if key is not None])


def request_body(request: GenerationRequest, rid: str, with_experts: bool) -> dict[str, Any]:
    """What /generate is sent. Nothing is left to the server's defaults that changes what is drawn.

    SGLang also stops at the end-of-sequence tokens of the model's files, and ``ignore_eos`` switches every stop token
    off: it is set only where there are none. `servers.model_directory` writes files that name no such token.
    """
    params = request.params
    sampling = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": not params.stop_token_ids,
        "sampling_seed": request.seed & ((1 << _SEED_BITS) - 1),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    body = {
        "rid": rid,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    return body | {"return_routed_experts": True} if with_experts else body


def _message(text: str) -> str:
    """What an answer that refuses says to people."""
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(text)
        for inner in (tree, tree.get("error") if isinstance(tree, Mapping) else None):
            if isinstance(inner, Mapping) and isinstance(inner.get("message"), str):
                return str(inner["message"])
    return text


def _quoted(message: str) -> str:
    """On one line, and short; but a server that explains itself is heard out."""
    return repr(message[:_MAX_MESSAGE])


def _secret(key: Key) -> Secret | None:
    return Secret(key) if isinstance(key, str) else key


def _read_kind(info: Any) -> EngineKind:
    version = info.get("version") if isinstance(info, Mapping) else None
    numbers = re.match(r"\d+(\.\d+)*", version) if isinstance(version, str) else None
    if numbers is None:
        raise EngineFault("garbled", "/server_info names no version")
    tp_size = info.get("tp_size", 1)
    return EngineKind(
        name="embedded" if info.get("engine") == "megarl-embedded" else "sglang",
        version=tuple(int(number) for number in numbers[0].split(".")),
        tp_size=tp_size if type(tp_size) is int and tp_size > 0 else 1,
    )

"""From what a server answers to a `Generation` that may be trained on, or to a fault.

Nothing is believed: whatever passes here is complete, belongs to the request, and is consistent in itself. What is not
shaped as the route promises is "garbled"; what is, but must not be trained on, is "rejected".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megarl.core.engine_fault import EngineFault
from megarl.core.excerpt import excerpt
from megarl.core.protocols import Generation, GenerationRequest
from megarl.core.sample import Finish, VersionSpan

# Rounding may lift a log-prob a little above 0; more than this is not rounding.
_ROUNDING = 1e-3
_MAX_VERSION_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server was asked, to hold its answer against."""

    request: GenerationRequest
    # of this attempt
    rid: str
    # in words for people
    engine: str
    # exclusive upper bound of token ids
    vocab_size: int
    # (layers, experts per token) if the answer must say where each token was sent
    expert_shape: tuple[int, int] | None = None


def check_answer(answer: Any, asked: Asked) -> Generation:
    """The sample, checked. Raises `EngineFault` "garbled" or "rejected"."""
    meta = _field(answer, "meta_info", dict)
    if meta.get("id") != asked.rid:
        raise EngineFault("rejected", f"the answer has the id {excerpt(str(meta.get('id')))} of another request")
    finish, matched = _finish(meta)
    tokens = _tokens(_field(answer, "output_ids", list), asked.vocab_size)
    logprobs = _logprobs(_field(meta, "output_token_logprobs", list), tokens)
    _check_counts(meta, asked.request, len(tokens), finish)
    finish = _end_before_abort(tokens, finish, asked.request)
    _check_end(tokens, finish, matched, asked.request)
    version, spans = _versions(meta, len(tokens))
    return Generation(
        id=asked.request.id,
        token_ids=tokens,
        logprobs=logprobs,
        finish=finish,
        version=version,
        spans=spans,
        engine=asked.engine,
        routed_experts=_routed_experts(meta, asked, len(tokens), finish),
    )


def read_version(text: Any) -> int:
    """The version that megarl gave to weights; 0 for weights that came from elsewhere."""
    if text == "default":
        return 0
    if not isinstance(text, str) or not text.isascii() or not text.isdecimal() or len(text) > _MAX_VERSION_DIGITS:
        raise EngineFault("garbled", f"weight_version {excerpt(str(text))} is not a number that megarl gave")
    return int(text)


def _field(tree: Any, name: str, kind: type) -> Any:
    value = tree.get(name) if isinstance(tree, Mapping) else None
    if type(value) is not kind:
        raise EngineFault("garbled", f"{name} is {_describe(value)}, not {kind.__name__}")
    return value


def _describe(value: Any) -> str:
    return "missing" if value is None else type(value).__name__


def _finish(meta: Mapping[str, Any]) -> tuple[Finish, Any]:
    reason = _field(meta, "finish_reason", dict)
    kind = reason.get("type")
    if kind not in ("stop", "length", "abort"):
        raise EngineFault("garbled", f"finish_reason {excerpt(str(kind))} is not stop, length or abort")
    return cast(Finish, kind), reason.get("matched")


def _tokens(ids: list[Any], vocab_size: int) -> NDArray[np.int64]:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            what = f"{excerpt(str(token))} is not one from 0 to {vocab_size - 1}"
            raise EngineFault("garbled", f"output_ids: the token id {what}")
    return np.array(ids, dtype=np.int64)


def _logprobs(entries: list[Any], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    if len(entries) != len(tokens):
        raise EngineFault("rejected", f"{len(tokens)} tokens with {len(entries)} log-probs")
    values: list[float] = []
    for place, entry in enumerate(entries):
        if type(entry) is not list or len(entry) < 2 or type(entry[1]) is not int:
            raise EngineFault("garbled", f"output_token_logprobs[{place}] is not a log-prob and a token id")
        value, token = entry[:2]
        if token != tokens[place]:
            raise EngineFault("rejected", f"the log-prob at {place} is of token {token}, not of {tokens[place]}")
        if type(value) not in (float, int):
            raise EngineFault("rejected", f"the log-prob at {place} is {_describe(value)}")
        values.append(value)
    try:
        with np.errstate(over="ignore"):
            logprobs = np.array(values, dtype=np.float64).astype(np.float32)
    except OverflowError:
        raise EngineFault("rejected", "a log-prob is beyond any number") from None
    if not np.isfinite(logprobs).all():
        raise EngineFault("rejected", "a log-prob is not finite")
    if (logprobs > _ROUNDING).any():
        raise EngineFault("rejected", f"a log-prob is {logprobs.max()}, above 0")
    return np.minimum(logprobs, np.float32(0.0))


def _check_counts(meta: Mapping[str, Any], request: GenerationRequest, num_tokens: int, finish: Finish) -> None:
    """A request that was aborted before it ran has no counts."""
    for name, expected in (("prompt_tokens", len(request.token_ids)), ("completion_tokens", num_tokens)):
        said = meta.get(name)
        if said is None and finish == "abort":
            continue
        if type(said) is not int:
            raise EngineFault("garbled", f"{name} is {_describe(said)}, not int")
        if said != expected:
            raise EngineFault("rejected", f"{name} is {said}; it must be {expected}")


def _end_before_abort(tokens: NDArray[np.int64], finish: Finish, request: GenerationRequest) -> Finish:
    """A response that was at its end when it was aborted has nothing left to draw; SGLang says abort all the same."""
    if finish == "abort" and len(tokens):
        if int(tokens[-1]) in request.params.stop_token_ids:
            return "stop"
        if len(tokens) == request.params.max_new_tokens:
            return "length"
    return finish


def _check_end(tokens: NDArray[np.int64], finish: Finish, matched: Any, request: GenerationRequest) -> None:
    """The response ends where its finish reason says, and nowhere before."""
    limit, stops = request.params.max_new_tokens, request.params.stop_token_ids
    if len(tokens) > limit:
        raise EngineFault("rejected", f"{len(tokens)} tokens; at most {limit} were asked for")
    if finish != "abort" and not len(tokens):
        raise EngineFault("rejected", "there is no token")
    body = tokens[:-1] if finish == "stop" else tokens
    if np.isin(body, stops).any():
        raise EngineFault("rejected", "the response goes on after a stop token")
    if finish == "stop":
        last = int(tokens[-1])
        if last not in stops:
            raise EngineFault("rejected", f"it stopped at token {last}, which is not one of the stop tokens {stops}")
        if type(matched) is int and matched != last:
            raise EngineFault("rejected", f"it says that token {matched} stopped it, but the last one is {last}")
    elif finish == "length" and len(tokens) != limit:
        raise EngineFault("rejected", f"cut at {len(tokens)} tokens; {limit} were allowed")


def _versions(meta: Mapping[str, Any], num_tokens: int) -> tuple[int, tuple[VersionSpan, ...]]:
    """The oldest weights that drew tokens, and which drew what if there were several."""
    overall = read_version(meta.get("weight_version"))
    told = meta.get("weight_versions")
    if told is None or not num_tokens:
        return overall, ()
    if type(told) is not list or not told:
        raise EngineFault("garbled", f"weight_versions is {_describe(told)}, not spans")
    spans = _spans(told, num_tokens)
    if spans[-1].version != overall and spans[0].version != overall:
        raise EngineFault("rejected", f"weight_version {overall} is in none of the spans")
    return spans[0].version, spans if len(spans) > 1 else ()


def _spans(told: Sequence[Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Spans that cover the tokens without a gap, versions rising; neighbours of one version are one span."""
    spans: list[VersionSpan] = []
    reached = 0
    for entry in told:
        start, stop = _field(entry, "start", int), _field(entry, "end", int)
        version = read_version(entry.get("version"))
        if start != reached or stop <= start:
            raise EngineFault("rejected", f"weight_versions: a span from {start} to {stop} follows {reached} tokens")
        if spans and version < spans[-1].version:
            raise EngineFault("rejected", f"weight_versions: version {version} follows {spans[-1].version}")
        if spans and version == spans[-1].version:
            spans[-1] = spans[-1]._replace(stop=stop)
        else:
            spans.append(VersionSpan(version, start, stop))
        reached = stop
    if reached != num_tokens:
        raise EngineFault("rejected", f"weight_versions cover {reached} of {num_tokens} tokens")
    return tuple(spans)


def _routed_experts(meta: Mapping[str, Any], asked: Asked, num_tokens: int, finish: Finish) -> NDArray[np.int32] | None:
    """Where each token but the last was sent. A request that was aborted before it ran was sent nowhere."""
    if asked.expert_shape is None or (finish == "abort" and not num_tokens):
        return None
    try:
        data = base64.b64decode(_field(meta, "routed_experts", str), validate=True)
    except binascii.Error:
        raise EngineFault("garbled", "routed_experts is not base64") from None
    num_rows = len(asked.request.token_ids) + num_tokens - 1
    expected = num_rows * asked.expert_shape[0] * asked.expert_shape[1]
    if len(data) != expected * np.dtype(np.int32).itemsize:
        raise EngineFault("rejected", f"routed_experts has {len(data)} bytes; it must have {expected * 4}")
    experts = np.frombuffer(data, dtype="<i4").astype(np.int32).reshape(num_rows, *asked.expert_shape)
    if (experts < 0).any():
        raise EngineFault("rejected", "routed_experts has negative numbers of experts")
    return experts

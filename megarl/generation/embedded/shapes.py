"""The JSON of SGLang's /generate, to and from requests and generations.

What SGLang would do and this engine cannot is refused, not ignored. There is one thing that the engine does not know,
which is the model's end-of-sequence token: only ``stop_token_ids`` end a response.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.sample import VersionSpan
from megarl.core.seeding import derive_seed

_DEFAULT_NEW_TOKENS = 128
# SGLang takes a smaller temperature for greedy
_SMALLEST_TEMPERATURE = 1e-6
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {})
# Fields that may only be switched off, and those that do not touch token ids.
_BODY_OFF: tuple[Any, ...] = (
    "text", "stream", "top_logprobs_num", "token_ids_logprob", "return_hidden_states", "return_routed_experts",
    "lora_path", "image_data", "input_embeds", "return_prompt_token_ids", "return_entropy", "return_sampling_mask",
)  # fmt: skip
_BODY_READ = ("input_ids", "rid", "sampling_params", "return_logprob", "logprob_start_len")
_BODY_HARMLESS = ("return_text_in_logprobs", "priority", "log_metrics", "routing_key", "session_id")
_PARAMS_OFF: tuple[Any, ...] = (
    "min_p", "frequency_penalty", "presence_penalty", "min_new_tokens", "stop", "stop_regex", "json_schema", "regex",
    "ebnf", "structural_tag", "logit_bias", "custom_params", "beam_width",
)  # fmt: skip
_PARAMS_READ = (
    "max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed", "ignore_eos",
    "n", "repetition_penalty",
)  # fmt: skip
_PARAMS_HARMLESS = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")


@dataclass(frozen=True, slots=True)
class Asked:
    """A body of /generate. ``is_batch``: the answer is a list."""

    requests: list[GenerationRequest]
    is_batch: bool
    with_logprobs: bool


def read_generate(body: Any) -> Asked:
    """The requests of a body. Raises ValueError that says which field is wrong."""
    fields = _known(body, "the body", _BODY_READ + _BODY_HARMLESS, _BODY_OFF)
    prompts = fields.get("input_ids")
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("input_ids must be a list of token ids, or a list of such lists")
    is_batch = isinstance(prompts[0], list)
    many = prompts if is_batch else [prompts]
    start = _integer(fields, "logprob_start_len", -1)
    if start != -1 and any(start < len(prompt) for prompt in many if isinstance(prompt, list)):
        raise ValueError("logprob_start_len must be -1: log-probs of the prompt are not computed")
    rids = _per_request(fields.get("rid"), is_batch, len(many), "rid")
    params = _per_request(fields.get("sampling_params"), is_batch, len(many), "sampling_params")
    requests = [_request(*parts) for parts in zip(many, rids, params, strict=True)]
    if len({request.id for request in requests}) != len(requests):
        raise ValueError("rid: two requests of the batch have the same")
    return Asked(requests, is_batch, bool(_boolean(fields, "return_logprob")))


def answer(asked: GenerationRequest, generation: Generation, with_logprobs: bool, seconds: float) -> dict[str, Any]:
    """One response. The last span's version is the response's, as in SGLang."""
    num_tokens = len(generation.token_ids)
    spans = generation.spans or (VersionSpan(generation.version, 0, num_tokens),)
    token_ids = generation.token_ids.tolist()
    meta = {
        "id": generation.id,
        "finish_reason": _finish_reason(generation),
        "prompt_tokens": len(asked.token_ids),
        "completion_tokens": num_tokens,
        # There is no cache from call to call. That a group computes its prompt once is not told apart here.
        "cached_tokens": 0,
        "weight_version": str(spans[-1].version),
        "weight_versions": [{"version": str(span.version), "start": span.start, "end": span.stop} for span in spans],
        "e2e_latency": seconds,
    }
    if with_logprobs:
        # fp32 fits into the doubles of JSON: written with all their digits, they come back bit for bit.
        logprobs = generation.logprobs.astype(np.float64).tolist()
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, token_ids, strict=True)]
        meta["output_token_logprobs_length"] = num_tokens
        meta["input_token_logprobs"] = []
    return {"text": "", "output_ids": token_ids, "meta_info": meta}


def _finish_reason(generation: Generation) -> dict[str, Any]:
    if generation.finish == "stop":
        return {"type": "stop", "matched": int(generation.token_ids[-1])}
    if generation.finish == "length":
        return {"type": "length", "length": len(generation.token_ids)}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _request(prompt: Any, rid: Any, params: Any) -> GenerationRequest:
    if not isinstance(prompt, list) or not all(_is_id(token) for token in prompt):
        raise ValueError("input_ids must hold token ids: whole numbers")
    if rid is not None and (not isinstance(rid, str) or not rid):
        raise ValueError("rid must be text that is not empty")
    rid = rid or uuid.uuid4().hex
    fields = _known({} if params is None else params, "sampling_params", _PARAMS_READ + _PARAMS_HARMLESS, _PARAMS_OFF)
    seed = _integer(fields, "sampling_seed", derive_seed("rid", rid))
    return GenerationRequest(rid, np.array(prompt, dtype=np.int64), seed, _params(fields))


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    for name in ("n", "repetition_penalty"):
        if fields.get(name) not in (None, 1):
            raise ValueError(f"sampling_params.{name} must be 1")
    temperature, top_k = _number(fields, "temperature", 1.0), _integer(fields, "top_k", -1)
    if top_k < 1 and top_k != -1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    stops = fields.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(_is_id(token) for token in stops):
        raise ValueError("sampling_params.stop_token_ids must be a list of token ids")
    return SamplingParams(
        max_new_tokens=_integer(fields, "max_new_tokens", _DEFAULT_NEW_TOKENS),
        temperature=0.0 if 0 <= temperature < _SMALLEST_TEMPERATURE else temperature,
        top_p=_number(fields, "top_p", 1.0),
        top_k=0 if top_k == -1 else top_k,
        # In SGLang this switches every stop token off, those of the request as well.
        stop_token_ids=() if _boolean(fields, "ignore_eos") else tuple(stops),
    )


def _known(fields: Any, what: str, known: Sequence[str], only_off: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(fields, dict):
        raise ValueError(f"{what} must be an object")
    for name, value in fields.items():
        if name in only_off and value in _OFF:
            continue
        if name not in known:
            raise ValueError(f"{what}: this engine cannot do {name[:80]!a}")
    return fields


def _per_request(value: Any, is_batch: bool, count: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        if is_batch and name == "rid" and value is not None:
            return [f"{value}_{index}" for index in range(count)]
        return [value] * count
    if not is_batch or len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _integer(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not _is_id(value):
        raise ValueError(f"{name} must be a whole number")
    return int(value)


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise ValueError(f"{name} must be a finite number")
    return float(value)


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{name} must be true or false")
    return bool(value)

"""Prompts and samples on their way to a worker. Each call gets copies of its own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megarl.core import wire
from megarl.core.sample import Prompt, Sample, Turn, VersionSpan

# where an engine's router sent each token: large, and of no use to a reward
_LEFT_OUT = "routed_experts"


def wrap(prompt: Prompt, sample: Sample) -> bytes:
    """Both as bytes that carry no code. Raises TypeError if a row holds something that JSON cannot."""
    asked = {field.name: getattr(prompt, field.name) for field in fields(prompt)}
    asked["metadata"] = dict(prompt.metadata)
    asked["messages"] = [dict(message) for message in prompt.messages]
    answered = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != _LEFT_OUT}
    return wire.encode([asked, answered])


def unwrap(parcel: bytes) -> tuple[Prompt, Sample]:
    """What `wrap` was given."""
    asked, answered = wire.decode(parcel)
    return Prompt(**asked | {"messages": tuple(asked["messages"])}), Sample(**_with_tuples(answered))


def _with_tuples(answered: dict[str, Any]) -> dict[str, Any]:
    return answered | {
        "turns": tuple(Turn(*turn) for turn in answered["turns"]),
        "spans": tuple(VersionSpan(*span) for span in answered["spans"]),
    }

"""Prompts and samples as reward functions get them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.core.sample import Finish, Prompt, Sample


def make_prompt(answer: str | None = None, text: str = "?", **metadata: Any) -> Prompt:
    return Prompt("train.jsonl:3", text, np.zeros(1, np.int64), answer, metadata=metadata)


def make_sample(response: str = "", num_tokens: int = 0, finish: Finish = "stop") -> Sample:
    """A response of ``num_tokens`` sampled tokens, after a prompt of one."""
    mask = np.ones(num_tokens + 1, np.int8)
    mask[0] = 0
    return Sample(np.zeros(len(mask), np.int64), mask, np.zeros(len(mask), np.float32), finish, response)

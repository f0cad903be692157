"""What the layers promise each other. Implementations meet only in `run/build.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.core.sample import Finish

EnginePart = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to draw. The draw is a function of the weights, the prompt, the params and the seed alone."""

    id: str
    token_ids: NDArray[np.int64]
    seed: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """The new tokens (a stop token included) and the log-prob of each under the temperature-scaled policy.

    Log-probs are of the whole vocabulary's distribution, before top-p and top-k cut it, so that they can be compared with
    the trainer's. A greedy draw reports temperature 1.
    """

    id: str
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finish: Finish
    version: int


class Engine(Protocol):
    """A generation engine with SGLang's semantics: token ids in, token ids and log-probs out."""

    @property
    def version(self) -> int:
        """The version of the weights that are served now."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Serve all requests; results in the order of the requests."""

    def begin_weight_update(self) -> None:
        """From here to `end_weight_update` the engine does not serve."""

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take a bucket of (Hugging Face name, full tensor)."""

    def end_weight_update(self, version: int) -> None:
        """Serve the new weights under their version. Raises if a parameter never arrived."""

    def checksum(self) -> int:
        """An order-independent checksum over every parameter's bits, by Hugging Face name (see `core.checksum`)."""

    def release(self, part: EnginePart) -> None:
        """Give the part's memory back. Released weights are lost until the next `update_weights`."""

    def resume(self, part: EnginePart) -> None:
        """Take the part's memory again; contents are undefined until written."""

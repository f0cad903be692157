"""The embedded engine's life: weights come and go, memory comes and goes, requests are served in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from megarl.config.model_shape import ModelShape
from megarl.core.device import release_freed_memory
from megarl.core.errors import EngineError
from megarl.core.protocols import EnginePart, Generation, GenerationRequest
from megarl.generation.embedded.decoder import Decoder
from megarl.generation.embedded.kv_pool import KvPool
from megarl.generation.embedded.rows import Finished
from megarl.generation.embedded.sampler import check_params
from megarl.generation.embedded.schedule import Schedule, num_pool_rows
from megarl.generation.embedded.weights import DecoderWeights, name_some


class EmbeddedEngine:
    """An `Engine` in plain torch, in this process.

    It serves only while it holds a complete set of weights and its KV pool. ``num_slots`` requests decode at a time;
    prompt and response together have at most ``max_sequence_length`` tokens.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_slots: int,
        max_sequence_length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if num_slots < 1 or max_sequence_length < 2:
            raise ValueError(f"num_slots={num_slots} must be at least 1, max_sequence_length={max_sequence_length} 2")
        self._device = torch.device(device)
        self._shape = shape
        self._num_slots = num_slots
        self._weights = DecoderWeights(shape, self._device, dtype)
        self._pool = KvPool(shape, num_pool_rows(num_slots), max_sequence_length, dtype, self._device)
        self._decoder = Decoder(shape, self._weights, self._pool)
        self._version = 0
        self._is_loaded = False
        # Parameters that the running update still owes; None when no update is running.
        self._missing: set[str] | None = None

    @property
    def version(self) -> int:
        """The version of the weights that are served now; 0 before the first ones."""
        return self._version

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; 0 while they are released."""
        return self._weights.num_bytes

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV pool; 0 while it is released."""
        return self._pool.num_bytes

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens computed since the engine was built; a prompt that a group shares counts once per call."""
        return self._decoder.num_prefilled_tokens

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Serve all requests; results in the order of the requests."""
        self._check_serving()
        for request in requests:
            self._check_request(request)
        if not requests:
            return []
        with torch.inference_mode():
            finished = Schedule(requests, self._decoder, self._pool, self._num_slots).run()
        finished.sort(key=lambda done: done.request)
        self._check_finite(requests, finished)
        return [
            Generation(requests[done.request].id, done.token_ids, done.logprobs, done.finish, self._version)
            for done in finished
        ]

    def begin_weight_update(self) -> None:
        """From here to `end_weight_update` the engine does not serve."""
        if not self._weights.num_bytes:
            raise EngineError(
                "MRL-5105", "weight update: the engine's weights are released. Call resume('weights') first."
            )
        if self._missing is not None:
            raise EngineError("MRL-5108", "weight update: one is already running. End it before beginning another.")
        self._missing = set(self._weights.names)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket of (Hugging Face name, full tensor) into place."""
        missing = self._running_update()
        for name, tensor in tensors:
            self._weights.write(name, tensor)
            missing.discard(name)

    def end_weight_update(self, version: int) -> None:
        """Serve the new weights. If parameters are missing the update goes on, and the engine does not serve."""
        missing = self._running_update()
        if missing:
            raise EngineError(
                "MRL-5104",
                f"weight update to version {version}: {len(missing)} of {len(self._weights.names)} parameters never "
                f"arrived: {name_some(missing)}. Send every parameter between begin and end.",
            )
        self._missing = None
        self._is_loaded = True
        self._version = version

    def checksum(self) -> int:
        """The checksum of `core.checksum` over every parameter."""
        if not self._is_loaded or self._missing is not None:
            raise EngineError("MRL-5105", f"checksum: {self._why_no_weights()}")
        return self._weights.checksum()

    def release(self, part: EnginePart) -> None:
        """Give the part's memory back. Released weights are lost until the next update."""
        if part == "kv_cache":
            self._pool.release()
        elif self._missing is not None:
            raise EngineError("MRL-5108", "release('weights'): a weight update is running. End it first.")
        else:
            self._weights.release()
            self._is_loaded = False
        # An allocator may keep freed memory for itself, even that of a large tensor.
        release_freed_memory(self._device)

    def resume(self, part: EnginePart) -> None:
        """Take the part's memory again. A part that is not released stays as it is."""
        if part == "kv_cache" and not self._pool.num_bytes:
            self._pool.resume()
        if part == "weights" and not self._weights.num_bytes:
            self._weights.resume()

    def _running_update(self) -> set[str]:
        if self._missing is None:
            raise EngineError("MRL-5108", "weight update: none is running. Call begin_weight_update() first.")
        return self._missing

    def _why_no_weights(self) -> str:
        if self._missing is not None:
            return "a weight update is running. Call end_weight_update(version) first."
        return "the engine holds no weights. Send them between begin_weight_update() and end_weight_update(version)."

    def _check_serving(self) -> None:
        if not self._is_loaded or self._missing is not None:
            raise EngineError("MRL-5105", f"generate: {self._why_no_weights()}")
        if not self._pool.num_bytes:
            raise EngineError("MRL-5105", "generate: the KV cache is released. Call resume('kv_cache') first.")

    def _check_request(self, request: GenerationRequest) -> None:
        check_params(request.params)
        who, length, new = f"request {request.id[:80]!a}", len(request.token_ids), request.params.max_new_tokens
        if length + new > self._pool.num_positions:
            raise EngineError(
                "MRL-5101",
                f"{who}: {length} prompt tokens + max_new_tokens {new} = {length + new}, more than the engine's "
                f"max_sequence_length {self._pool.num_positions}. Shorten the prompt, lower max_new_tokens to "
                f"{self._pool.num_positions - length}, or build the engine with room for {length + new}.",
            )
        ids = np.asarray(request.token_ids)
        if not length or ids.min() < 0 or ids.max() >= self._shape.vocab_size:
            found = f"token ids {ids.min()} to {ids.max()}" if length else "no tokens"
            raise EngineError(
                "MRL-5106",
                f"{who}: the prompt has {found}; it needs at least one, each from 0 to {self._shape.vocab_size - 1}. "
                "Does the tokenizer belong to this model?",
            )

    def _check_finite(self, requests: Sequence[GenerationRequest], finished: Sequence[Finished]) -> None:
        """Weights that give NaN must not give samples, and what they left in the pool must not reach the next call."""
        for done in finished:
            if not np.isfinite(done.logprobs).all():
                self._pool.forget()
                raise EngineError(
                    "MRL-5107",
                    f"request {requests[done.request].id[:80]!a}: log-probs are not finite under weights version "
                    f"{self._version}. The weights hold NaN or infinite values: look at the last training step.",
                )

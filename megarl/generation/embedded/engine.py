"""The embedded engine's life: weights come and go, memory comes and goes, requests are served in between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from megarl.config.model_shape import ModelShape
from megarl.core import whereabouts
from megarl.core.device import release_freed_memory
from megarl.core.errors import EngineError
from megarl.core.protocols import EnginePart, Generation, GenerationRequest, PauseMode
from megarl.generation.embedded.check import check_request
from megarl.generation.embedded.decoder import Decoder
from megarl.generation.embedded.job import Job
from megarl.generation.embedded.kv_pool import KvPool
from megarl.generation.embedded.schedule import Schedule, num_pool_rows
from megarl.generation.embedded.weights import DecoderWeights, name_some


class EmbeddedEngine:
    """An `Engine` in plain torch, in this process.

    It serves only while it holds a complete set of weights and its KV pool. ``num_slots`` requests decode at a time;
    prompt and response together have at most ``max_sequence_length`` tokens. Requests come in by `add` and move on by
    `step`, or both by `generate`. All methods may be called from any thread: they take turns between two steps.
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
        self._weights = DecoderWeights(shape, self._device, dtype)
        self._pool = KvPool(shape, num_pool_rows(num_slots), max_sequence_length, dtype, self._device)
        self._decoder = Decoder(shape, self._weights, self._pool)
        self._schedule = Schedule(self._decoder, self._pool, num_slots)
        self._version = 0
        self._is_loaded = False
        self._is_paused = False
        # Parameters that the running update still owes; None when no update is running.
        self._missing: set[str] | None = None
        self._condition = threading.Condition(threading.RLock())
        # One entry per thread that wants a turn. Whoever steps in a loop lets them in: a lock alone is not fair.
        self._knocks: deque[None] = deque()

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
    def max_sequence_length(self) -> int:
        """Tokens of prompt and response together, at most."""
        return self._pool.num_positions

    @property
    def num_prefilled_tokens(self) -> int:
        """Tokens prefilled since the engine was built; a prompt that a group shares counts once."""
        return self._decoder.num_prefilled_tokens

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._schedule.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._schedule.num_waiting

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `continue_generation` not yet."""
        return self._is_paused

    @property
    def has_weights(self) -> bool:
        """Whether weights were sent that are not released."""
        return self._is_loaded

    @property
    def can_serve(self) -> bool:
        """Whether weights and KV cache are there and no update is running."""
        return self._is_loaded and self._missing is None and self._pool.num_bytes > 0

    @property
    def can_step(self) -> bool:
        """Whether `step` would draw a token."""
        return not self._is_halted and not self._schedule.is_empty

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Serve all requests; results in the order of the requests. Waits while the engine is paused."""
        futures = self.add(requests)
        waiting = list(futures)
        try:
            while not _all_done(waiting):
                with self._condition:
                    self._condition.wait_for(
                        lambda: not self._knocks and (not self._is_halted or _all_done(waiting)),
                    )
                    self.step()
        except BaseException:
            with self._turn():
                self._end_by_abort(lambda job: job.future in futures)
            raise
        return [future.result() for future in futures]

    def add(self, requests: Sequence[GenerationRequest]) -> list[Future[Generation]]:
        """Let these requests in, all or (if one is refused) none. They are served by `step`."""
        with self._turn():
            # What comes during a pause waits for its end, whatever the engine lacks until then.
            if not self._is_paused:
                self._check_serving("generate")
            for request in requests:
                check_request(request, self._shape.vocab_size, self._pool.num_positions)
            jobs = [Job(request) for request in requests]
            self._schedule.add(jobs)
            return [job.future for job in jobs]

    def step(self) -> None:
        """Draw one token for every running request. Nothing happens while there is none, or during a pause."""
        whereabouts.tick()
        with self._condition:
            if not self.can_step:
                return
            try:
                with torch.inference_mode():
                    ended = self._schedule.step()
            except Exception as error:  # nobody must wait for ever for a request that cannot go on
                self._fail_all(error)
                return
            for job, is_finite in ended:
                if is_finite:
                    job.finish(job.natural_finish(), self._version)
                else:
                    job.future.set_exception(self._not_finite(job))

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests, or all, with what they have drawn. Unknown ids are ignored."""
        wanted = None if ids is None else frozenset(ids)
        with self._turn():
            self._end_by_abort(lambda job: wanted is None or job.request.id in wanted)

    def pause(self, mode: PauseMode) -> None:
        """Draw nothing until `continue_generation`; new requests wait."""
        with self._turn():
            self._is_paused = True
            if mode == "abort":
                self._end_by_abort(_every)
            elif mode == "retract":
                self._schedule.retract()

    def continue_generation(self) -> None:
        """Go on, after a running weight update if there is one. Nothing happens if the engine is not paused."""
        with self._turn():
            self._is_paused = False
            if self._missing is None and not self._schedule.is_empty:
                try:
                    self._check_serving("continue_generation")
                except EngineError as error:
                    self._fail_all(error)

    def begin_weight_update(self) -> None:
        """From here to `end_weight_update` the engine does not serve."""
        with self._turn():
            if not self._weights.num_bytes:
                raise EngineError(
                    "MRL-5105", "weight update: the engine's weights are released. Call resume('weights') first."
                )
            if self._missing is not None:
                raise EngineError("MRL-5108", "weight update: one is already running. End it before beginning another.")
            self._check_at_rest("weight update")
            self._weights.open()
            self._missing = set(self._weights.names)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket of (Hugging Face name, full tensor) into place."""
        with self._turn():
            missing = self._running_update()
            for name, tensor in tensors:
                self._weights.write(name, tensor)
                missing.discard(name)

    def end_weight_update(self, version: int) -> None:
        """Serve the new weights. If parameters are missing the update goes on, and the engine does not serve."""
        with self._turn():
            missing = self._running_update()
            if missing:
                raise EngineError(
                    "MRL-5104",
                    f"weight update to version {version}: {len(missing)} of {len(self._weights.names)} parameters "
                    f"never arrived: {name_some(missing)}. Send every parameter between begin and end.",
                )
            self._schedule.note_version(self._version)
            self._weights.seal()
            self._missing = None
            self._is_loaded = True
            self._version = version

    def checksum(self) -> int:
        """The checksum of `core.checksum` over every parameter."""
        with self._turn():
            if not self._is_loaded or self._missing is not None:
                raise EngineError("MRL-5105", f"checksum: {self._why_no_weights()}")
            return self._weights.checksum()

    def release(self, part: EnginePart) -> None:
        """Give the part's memory back. Released weights are lost until the next update."""
        with self._turn():
            self._check_at_rest(f"release({part!r})")
            if part == "kv_cache":
                self._check_no_kv()
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
        with self._turn():
            if part == "kv_cache" and not self._pool.num_bytes:
                self._pool.resume()
            if part == "weights" and not self._weights.num_bytes:
                self._weights.resume()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Between two steps of whoever is stepping; they see what changed before they go on."""
        self._knocks.append(None)
        with self._condition:
            self._knocks.pop()
            try:
                yield
            finally:  # also if the turn was refused: somebody made room for it, and waits
                self._condition.notify_all()

    @property
    def _is_halted(self) -> bool:
        return self._is_paused or self._missing is not None

    def _end_by_abort(self, is_wanted: Callable[[Job], bool]) -> None:
        for job in self._schedule.remove(is_wanted):
            job.finish("abort", self._version)

    def _fail_all(self, error: Exception) -> None:
        for job in self._schedule.remove(_every):
            job.future.set_exception(error)

    def _running_update(self) -> set[str]:
        if self._missing is None:
            raise EngineError("MRL-5108", "weight update: none is running. Call begin_weight_update() first.")
        return self._missing

    def _why_no_weights(self) -> str:
        if self._missing is not None:
            return "a weight update is running. Call end_weight_update(version) first."
        return "the engine holds no weights. Send them between begin_weight_update() and end_weight_update(version)."

    def _check_serving(self, what: str) -> None:
        if not self._is_loaded or self._missing is not None:
            raise EngineError("MRL-5105", f"{what}: {self._why_no_weights()}")
        if not self._pool.num_bytes:
            raise EngineError("MRL-5105", f"{what}: the KV cache is released. Call resume('kv_cache') first.")

    def _check_at_rest(self, what: str) -> None:
        if not self._is_paused and not self._schedule.is_empty:
            raise EngineError(
                "MRL-5109",
                f"{what}: {self.num_running} requests are running and {self.num_waiting} wait. Call pause(mode) first.",
            )

    def _check_no_kv(self) -> None:
        if self.num_running:
            raise EngineError(
                "MRL-5109",
                f"release('kv_cache'): it holds {self.num_running} requests that were paused in place. End them by "
                "abort(), or call pause('retract') so that they are computed anew.",
            )

    def _not_finite(self, job: Job) -> EngineError:
        """Weights that give NaN must not give samples."""
        return EngineError(
            "MRL-5107",
            f"request {job.request.id[:80]!a}: log-probs are not finite under weights version {self._version}. The "
            "weights hold NaN or infinite values: look at the last training step.",
        )


def _every(_job: Job) -> bool:
    return True


def _all_done(waiting: list[Future[Generation]]) -> bool:
    """Whether all have their result. Those at the end that have it are dropped, so that asking stays cheap."""
    while waiting and waiting[-1].done():
        waiting.pop()
    return not waiting

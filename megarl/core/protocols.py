"""What the layers promise each other. Implementations meet only in `run/build.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, SupportsFloat, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.sample import Finish, Group, VersionSpan
from megarl.core.world import World

EnginePart = Literal["weights", "kv_cache"]
# what becomes of running requests: they end with what they have; they wait and compute their KV anew; they wait
PauseMode = Literal["abort", "retract", "in_place"]


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

    Log-probs are of the whole vocabulary's distribution, before top-p and top-k cut it, so that they can be compared
    with the trainer's. A greedy draw reports temperature 1. An aborted request has the tokens that it got to.
    """

    id: str
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finish: Finish
    # of the weights that drew the first token, which are the oldest
    version: int
    # if the weights changed on the way: which drew which tokens, without a gap; empty if one version drew them all
    spans: tuple[VersionSpan, ...] = ()
    # who served it, in words for people; empty where there is only one
    engine: str = ""
    # [prompt and new tokens but the last, layers, experts per token]: where a sparse model sent each token (R3)
    routed_experts: NDArray[np.int32] | None = None


class Engine(Protocol):
    """A generation engine with SGLang's semantics: token ids in, token ids and log-probs out.

    `abort`, `pause` and `continue_generation` may be called from another thread while `generate` runs.
    """

    @property
    def version(self) -> int:
        """The version of the weights that are served now."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Serve all requests; results in the order of the requests."""

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests, or all: `generate` gives what they have, as finish "abort". Unknown ids are ignored."""

    def pause(self, mode: PauseMode) -> None:
        """Draw nothing until `continue_generation`; new requests wait."""

    def continue_generation(self) -> None:
        """Go on; nothing happens if the engine is not paused."""

    def begin_weight_update(self) -> None:
        """From here to `end_weight_update` the engine does not serve. Running requests must be paused first."""

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


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What a server is: megarl's own engine or SGLang, its version, and the devices that it spans."""

    name: Literal["embedded", "sglang"]
    version: tuple[int, ...]
    tp_size: int = 1


class RemoteEngine(Protocol):
    """One server that speaks SGLang's routes. Every call may raise `EngineFault`, which says what kind of failure it
    was; what that means for the server is the fleet's to decide.
    """

    @property
    def url(self) -> str:
        """Where it listens; also its name."""

    async def generate(self, request: GenerationRequest, timeout: float) -> Generation:
        """Serve one request. What comes back has been checked: lengths, ids, finite log-probs, the request's id."""

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""

    async def continue_generation(self) -> None:
        """See `Engine.continue_generation`."""

    async def kind(self) -> EngineKind:
        """What it says it is; asked once."""

    async def control(self, route: str, body: Mapping[str, Any], timeout: float) -> Any:
        """POST to a control route under the admin key; the JSON of the answer. For weight updates."""

    async def is_healthy(self, timeout: float) -> bool:
        """Whether it answers its health route. Never raises."""

    async def version(self) -> int:
        """The version of the weights that it says it serves; 0 for weights that megarl did not push."""

    async def release(self, parts: Sequence[EnginePart]) -> None:
        """See `Engine.release`. The engine must be idle."""

    async def resume(self, parts: Sequence[EnginePart]) -> None:
        """See `Engine.resume`."""


class PushTargets(Protocol):
    """The servers of a fleet, as a weight push sees them. Of the driver."""

    def targets(self) -> list[str]:
        """The addresses of all servers that are up, whatever weights they hold."""

    def pushed(self, url: str, version: int, problem: str | None) -> None:
        """What became of the push. Without a problem (version and checksum were compared) the server serves
        ``version`` from now on; with one it does not serve until a later push succeeds.
        """


class ServerProcesses(Protocol):
    """The server processes that a run started, seen by the fleet."""

    def is_running(self, url: str) -> bool:
        """Whether the server's process is alive. Cheap; does not speak HTTP."""

    async def end(self, url: str) -> None:
        """End what is left of it, at once: it may hold memory."""

    async def restart(self, url: str) -> None:
        """End what is left of it, start it anew at the same address, and wait until it is ready. It has no weights.
        Raises `EngineFault` if it does not come up.
        """


class Served(Protocol):
    """What became of a batch of requests."""

    @property
    def generations(self) -> Sequence[Generation | None]:
        """In the order of the requests; None for what nobody served."""

    @property
    def needs_push(self) -> bool:
        """Nobody serves, but somebody would after a push of weights: the rest has to be asked for again."""


class Batch(Protocol):
    """Requests on their way. Of the driver."""

    def wait(self, num_groups: int | None = None) -> Served:
        """Until all are served; or until ``num_groups`` groups are whole, and then the others give what they have, as
        finish "abort". Raises `EngineError` when too few servers are left, or none answers in time.
        """


# takes the place of a request among those that were made together, and its whole answer
OnServed = Callable[[int, Generation], None]


class Servers(PushTargets, Protocol):
    """The servers of a run. Of the driver."""

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        groups: Sequence[int],
        versions: range,
        on_served: OnServed | None = None,
    ) -> Batch:
        """Ask, in the background. ``groups[i]`` is the group of request i. Only what weights in ``versions`` drew is
        taken; ``on_served`` is told of it at once, from another thread.
        """

    def needs_push(self) -> bool:
        """Whether a server is up and serves no weights."""

    def release(self, parts: Sequence[EnginePart]) -> None:
        """See `Engine.release`; all servers."""

    def resume(self, parts: Sequence[EnginePart]) -> None:
        """See `Engine.resume`; all servers."""

    def report(self, meter: Statistics) -> None:
        """What happened since the last report."""

    def close(self) -> None:
        """Talk to nobody any more."""


class Fleet(Protocol):
    """All engines of a run behind one call."""

    def generate(self, requests: Sequence[GenerationRequest], meter: Statistics) -> list[Generation]:
        """The driver's requests, served by all engines; results in their order on the driver, [] elsewhere.
        Collective.
        """


class Statistics(Protocol):
    """Where statistics go: `metrics.Meter`, seen from below."""

    def mean(self, name: str, num: SupportsFloat, den: SupportsFloat) -> None:
        """Add to both sides of num / den."""

    def sum(self, name: str, x: SupportsFloat) -> None:
        """Add to a total."""

    def max(self, name: str, x: SupportsFloat) -> None:
        """Take the larger."""

    def min(self, name: str, x: SupportsFloat) -> None:
        """Take the smaller."""

    def last(self, name: str, x: SupportsFloat) -> None:
        """Replace the value."""

    def moments(self, name: str, n: SupportsFloat, mean: SupportsFloat, m2: SupportsFloat) -> None:
        """Add numbers by their count, mean and squared deviations."""

    def loss(self, name: str, partial: SupportsFloat, num_updates: int = 0) -> None:
        """Add a micro-batch's share of its optimizer step's loss."""


class Algorithm(Protocol):
    """One way to learn from samples. Credit is given twice: a number per sample, then a number per token."""

    @property
    def num_epochs(self) -> int:
        """Passes over a step's samples."""

    def credit_groups(self, groups: Sequence[Group], meter: Statistics) -> None:
        """On the driver, while groups are whole: set every sample's ``advantage``."""

    def credit_tokens(self, batch: TrainBatch, world: World, meter: Statistics) -> TrainBatch:
        """On every rank, after the models annotated the batch: fill ``advantages`` and ``returns``. Collective."""

    def policy_loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, meter: Statistics
    ) -> torch.Tensor:
        """This micro-batch's part of the loss: sum(micro.loss_weight * token loss)."""

    def value_loss(self, values: torch.Tensor, micro: MicroBatch, meter: Statistics) -> torch.Tensor:
        """The same for a critic."""


@runtime_checkable
class Remembers(Protocol):
    """An algorithm that `credit_groups` changes: what it has to remember from step to step. Of the driver."""

    def state(self) -> Mapping[str, NDArray[np.float64]]:
        """Arrays by name, for a checkpoint."""

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on where `state` was taken; of a run that was not remembering then, with nothing."""


class Annotator(Protocol):
    """A model that says something about the batch before it is learned from."""

    forward_phase: str
    annotation_timer: str

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill the model's columns of the batch. Collective."""


class SampleScorer(Protocol):
    """A model that scores samples on the ranks: what the reward `model` asks."""

    def score(self, groups: Sequence[Group]) -> list[list[float]]:
        """``[group][sample]`` on the driver, [] elsewhere, where there are no groups either. Collective: all ranks,
        inside the phase reward/compute_rewards.
        """


class OffloadPart(Protocol):
    """Something that takes device memory and can leave it."""

    resident: bool

    def offload(self) -> None:
        """Leave the device."""

    def onload(self) -> None:
        """Come back."""

    @property
    def num_bytes(self) -> int:
        """Device bytes that the part takes now."""

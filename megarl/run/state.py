"""Everything of a run that changes from step to step, gathered for a checkpoint and put back from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.checkpoint.store import Checkpoint
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.protocols import Algorithm, Remembers
from megarl.core.slices import Slice, Stateful
from megarl.core.world import DRIVER, World
from megarl.metrics.meter import Meter
from megarl.models.random_state import restore_tracker_state, tracker_state
from megarl.rollout.prompt_stream import MixedPrompts
from megarl.rollout.server_rollouts import ServerRollouts
from megarl.run.progress import Best, Progress, config_digest, template_digest
from megarl.run.recorder import Recorder
from megarl.run.rng import restore_rng_state, rng_state
from megarl.run.sync import EngineSync

_AHEAD = "rollouts/ahead"
_ALGORITHM = "algorithm/"


@dataclass(frozen=True, slots=True)
class Parts:
    """Who holds state: the models by role, the stages' prompts (of the driver), the engines, rollouts and recorder."""

    models: Mapping[str, Stateful]
    prompts: Mapping[str, MixedPrompts]
    sync: EngineSync | None
    # rollouts that are drawn ahead of their step; None if none are
    ahead: ServerRollouts | None
    algorithm: Algorithm
    recorder: Recorder
    # of the policy's weights, which an export has as well
    dtype: torch.dtype
    # of the training data's files, by path (of the driver)
    data_hashes: Mapping[str, str]


class RunState:
    """The state of all parts, as slices (tensors) and `Progress` (the rest)."""

    def __init__(self, config: RunConfig, world: World, parts: Parts) -> None:
        self._world = world
        self._parts = parts
        self._config: dict[str, Any] = config.model_dump(mode="json")
        self._template_digest = template_digest(config) if world.is_driver else None

    def settle(self, step: int, meter: Meter) -> None:
        """Before the state is written down: wait for samples that are under way after ``step``. Collective."""
        if self._parts.ahead is not None:
            self._parts.ahead.settle(step, meter)

    def rank_state(self) -> dict[str, torch.Tensor]:
        """What belongs to this rank alone: its generators and, on the driver, samples that are not trained on yet and
        what the algorithm remembers.
        """
        state = {**rng_state(self._world.device), **tracker_state()}
        if not self._world.is_driver:
            return state
        ahead = self._parts.ahead.state() if self._parts.ahead else None
        if ahead is not None:
            state[_AHEAD] = torch.from_numpy(ahead)
        algorithm = self._parts.algorithm
        remembered = algorithm.state() if isinstance(algorithm, Remembers) else {}
        return {**state, **{_ALGORITHM + name: torch.from_numpy(array) for name, array in remembered.items()}}

    def slices(self) -> list[Slice]:
        """This rank's share of all models. The models must be on the device."""
        return [one for model in self._parts.models.values() for one in model.slices()]

    def progress(self, step: int, best: Best | None) -> Progress:
        """The rest, after ``step``. The ledger is on the disk when this returns, so no checkpoint is ahead of it."""
        parts = self._parts
        return Progress(
            step=step,
            served_version=parts.sync.served_version() if parts.sync else None,
            cursors={stage: prompts.state() for stage, prompts in parts.prompts.items()},
            models={role: model.state() for role, model in parts.models.items()},
            num_samples=parts.recorder.num_samples,
            num_tokens=parts.recorder.num_tokens,
            ledger_bytes=parts.recorder.sync(),
            best=best,
            dtype=str(parts.dtype).removeprefix("torch."),
            config=self._config,
            config_digest=config_digest(self._config),
            template_digest=self._template_digest,
            data_hashes=dict(parts.data_hashes),
        )

    def restore(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Become what was saved. The models must be on the device. Collective."""
        parts = self._parts
        dtype = str(parts.dtype).removeprefix("torch.")
        if progress.dtype != dtype:
            raise ConfigError(
                "MRL-1504",
                f"the checkpoint of step {progress.step} was made in {progress.dtype}; this run computes in {dtype}.\n"
                f"Set model.dtype (auto: bf16 on CUDA, fp32 on CPU) so that it stays {progress.dtype}.",
            )
        room = [one for role, model in parts.models.items() for one in model.make_room(progress.models[role])]
        checkpoint.fill(room)
        for model in parts.models.values():
            model.restored()
        for stage, prompts in parts.prompts.items():
            prompts.restore(progress.cursors[stage])
        parts.recorder.num_samples = progress.num_samples
        parts.recorder.num_tokens = progress.num_tokens
        if parts.sync is not None and progress.served_version == progress.step:
            # So that the next step does not push, and count, what was pushed before the stop.
            parts.sync.refresh(progress.step, Meter())
        of_driver = (checkpoint.rank_state(DRIVER) or {}) if self._world.is_driver else {}
        self._restore_ahead(of_driver.get(_AHEAD))
        if isinstance(parts.algorithm, Remembers):
            own = {name: array for name, array in of_driver.items() if name.startswith(_ALGORITHM)}
            parts.algorithm.restore({name.removeprefix(_ALGORITHM): array.numpy() for name, array in own.items()})
        if same_layout(progress.config, self._config):
            generators = checkpoint.rank_state(self._world.rank)
            assert generators is not None, "the layout is the same"
            restore_rng_state(generators, self._world.device)
            restore_tracker_state(generators)

    def _restore_ahead(self, drawn: torch.Tensor | None) -> None:
        """Samples that are drawn and not trained on: their prompts are spent, so they must not be forgotten."""
        if self._parts.ahead is not None:
            self._parts.ahead.restore(None if drawn is None else drawn.numpy())
        elif drawn is not None:
            raise ConfigError(
                "MRL-1501",
                "the checkpoint holds samples that servers drew and no step has trained on; "
                "without servers nothing can go on with them.\n"
                "Set generation.num_servers (or urls, or engine: sglang) as it was, or start over with --fresh.",
            )


def same_layout(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether ranks hold the same parts under both configurations; only then do they go on with the same bits."""

    def layouts(config: Mapping[str, Any]) -> list[Any]:
        own = config["actor"]["parallel"]
        return [config["run"]["num_ranks"], own, *(config[role]["parallel"] or own for role in ("critic", "reference"))]

    return layouts(before) == layouts(after)

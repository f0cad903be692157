"""What `megarl eval` evaluates: a Hugging Face directory, a checkpoint of a run, or the configuration's own model."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.checkpoint.store import newest_good_step, open_checkpoint
from megarl.config.layout import model_shape
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError, MissingInputError, StorageError
from megarl.core.world import World
from megarl.run.choose_step import Step, open_step
from megarl.run.progress import Progress

if TYPE_CHECKING:
    from megarl.models.hf_weights import WeightSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """``path`` is None for the model of the configuration itself."""

    path: Path | None
    is_run: bool = False
    step: Step = None

    @property
    def overrides(self) -> list[str]:
        """Settings that make the configuration's model this one. Weights go with the config and the tokenizer that
        they were trained with.
        """
        if self.path is None:
            return []
        if not self.is_run:
            own: dict[str, Any] = {"path": str(self.path), "config": None}
            if (self.path / "tokenizer.json").is_file():
                own["tokenizer"] = None
        else:
            progress = Progress.from_tree(open_step(self._checkpoints, self.step).progress)
            own = {key: progress.config["model"][key] for key in ("path", "config", "tokenizer", "dtype")}
        # A mapping would be merged into the one that is there.
        return ["model.config=null", *(f"model.{key}={json.dumps(value)}" for key, value in own.items())]

    def weights(self, config: RunConfig, world: World) -> tuple[WeightSource, int | None]:
        """Its weights, and of a run the step that they are of: by default the newest that is whole. Collective."""
        from megarl.models.decoder import initial_weights
        from megarl.models.saved_weights import saved_weights

        if self.path is None or not self.is_run:
            path = Path(config.model.path) if config.model.path else None
            return initial_weights(model_shape(config), path, config.run.seed), None
        step = int(world.broadcast(self._driver_step() if world.is_driver else None))
        return saved_weights(open_checkpoint(self._checkpoints, step).read, model_shape(config)), step

    @property
    def _checkpoints(self) -> Path:
        assert self.path is not None
        return self.path / "checkpoints"

    def _driver_step(self) -> int:
        if self.step is not None:
            return open_step(self._checkpoints, self.step).step
        step, wrong = newest_good_step(self._checkpoints)
        for text in wrong:
            logger.warning("%s", text.partition("\n")[0])
        if step is None:
            raise StorageError("MRL-7301", f"{self._checkpoints} has no checkpoint that is whole.")
        return step


def find_candidate(path: Path | None, step: Step) -> Candidate:
    """What ``--model`` and ``--step`` name. Reads at most a checkpoint's manifest."""
    is_run = path is not None and (path / "resolved.yaml").is_file()
    if step is not None and not is_run:
        raise ConfigError(
            "MRL-1490", "--step chooses a checkpoint of a run.\nName the run with --model RUN, or drop it."
        )
    if path is None or is_run:
        return Candidate(path, is_run, step)
    if not (path / "config.json").is_file():
        raise MissingInputError(
            "MRL-4202",
            f"--model {path} is neither a run nor a model: there is no resolved.yaml and no config.json in it.\n"
            "Name a run directory, such as runs/NAME, or a local Hugging Face directory.",
        )
    return Candidate(path)

"""What `megarl eval` does, before any rank is started: which sets, and where its files go."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError, StorageError


def config_to_evaluate(config: RunConfig, names: Sequence[str]) -> RunConfig:
    """The configuration with only the sets of these names (all, if there are none), and with engines."""
    known = [name for _, name, _ in config.eval_sets]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        what = f"--set {unknown[0]}: there is no such set." if unknown else "there is nothing to evaluate."
        there = f"Sets of this configuration: {', '.join(known)}." if known else "Write eval.sets: {NAME: {data: ...}}"
        raise ConfigError("MRL-1491", f"{what}\n{there}")
    chosen = {
        kind: {name: one for own, name, one in config.eval_sets if own == kind and (not names or name in names)}
        for kind in ("eval", "bench")
    }
    twice = sorted(chosen["eval"].keys() & chosen["bench"].keys())
    if twice:
        raise ConfigError(
            "MRL-1492",
            f"eval.sets.{twice[0]} and eval.bench_sets.{twice[0]} would both be reported as bench/{twice[0]}.\n"
            "Give one of them another name.",
        )
    sets = config.eval.model_copy(update={"sets": chosen["eval"], "bench_sets": chosen["bench"]})
    assert config.rollout is not None, "checked with the configuration: there are sets"
    rollout = config.rollout.model_copy(update={"replay": None})
    return config.model_copy(update={"eval": sets, "rollout": rollout})


def new_directory(config: RunConfig) -> Path:
    """A directory for one evaluation, beside what a run of that name may be writing at the moment."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = Path(config.run.dir) / config.run.name / "eval" / f"{stamp}-{secrets.token_hex(2)}"
    try:
        (path / "logs").mkdir(parents=True)
    except OSError as error:
        raise StorageError("MRL-7002", f"{path} cannot be made: {error.strerror}.") from error
    return path


def moved_to(config: RunConfig, directory: Path) -> RunConfig:
    """The configuration with a directory of its own: what engines, rewards and ranks write must not meet a run's."""
    run = config.run.model_copy(update={"dir": str(directory.parent), "name": directory.name})
    return config.model_copy(update={"run": run})

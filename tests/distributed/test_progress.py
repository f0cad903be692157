"""Models tell the watchdog of every parameter that is loaded or exported, and of every micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.test_update import _batch, _policy
from tests.distributed.tiny_models import tiny_model


def progress_job(world: Any, directory: str) -> dict[str, bool]:
    from megarl.algorithms.grpo import Grpo
    from megarl.config.algorithms import GrpoSettings
    from tests.unit.whereabouts_told import tells

    made: dict[str, Any] = {}
    algorithm = Grpo(GrpoSettings(name="grpo"))
    work = {
        "load": lambda: made.update(policy=_policy(world, directory)),
        "annotate": lambda: made.update(batch=_batch(world, made["policy"], algorithm)),
        "update": lambda: made["policy"].update(made["batch"], algorithm),
        "export": lambda: list(made["policy"].export()),
    }
    return {name: tells(part) for name, part in work.items()}


def test_models_tell_that_they_get_on(gang: Any, tmp_path: Path) -> None:
    """On both stages of a pipeline: the first one, too, which has no outputs."""
    tiny_model("qwen3", tied=True, directory=tmp_path)
    for told in gang(2).run(progress_job, pp_size=2, directory=str(tmp_path)):
        assert told == dict.fromkeys(["load", "annotate", "update", "export"], True)

"""Weights & Biases.

It drops a step that is not above the last one. Offline, a run cannot be continued: every process writes all of it anew,
and then removes what earlier processes of the same run left. Online, the service says which step it has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import wandb
from pydantic import ValidationError
from wandb.errors import CommError, UsageError

from megarl.trackers.backend import Refused, TrackedRun, answers, remove_earlier, revealed
from megarl.trackers.tail import Alert, LedgerLine

# Nothing but metrics and configuration leaves the machine: no code, no command line, no git remote, no packages.
_PRIVATE: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "silent": True,
    "symlink": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
_LEVELS = {0: "INFO", 1: "INFO", 2: "WARN"}


class ToWandb:
    """One W&B run, under the run's own id."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._mode: Any = run.kwargs.get("mode") or os.environ.get("WANDB_MODE", "online")
        self._log_dir = Path(run.kwargs.get("log_dir") or run.own_directory)

    @property
    def is_offline(self) -> bool:
        """Whether the run is written to the disk, for `wandb sync`."""
        return bool(self._mode == "offline")

    def start(self) -> int:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        kwargs = revealed(self._run.kwargs)
        try:
            settings = wandb.Settings(**(_PRIVATE | {"api_key": kwargs.get("api_key")} | kwargs.get("settings", {})))
        except ValidationError as error:
            raise Refused(f"tracker_kwargs.settings: {error.errors()[0]['msg']}") from None
        if not self.is_offline and not answers(settings.base_url):
            raise ConnectionError(f"{settings.base_url} does not answer")  # W&B itself would try for a minute and more
        try:
            self._service: Any = wandb.init(
                mode=self._mode,
                dir=str(self._log_dir),
                id=self._run.run_id,
                resume=None if self.is_offline else "allow",
                project=kwargs.get("project", "megarl"),
                name=kwargs.get("name", self._run.config.run.name),
                config=self._run.description(),
                settings=settings,
                **{key: kwargs[key] for key in ("entity", "group", "notes", "tags") if key in kwargs},
            )
        except UsageError as error:
            raise Refused(str(error)) from error
        except CommError as error:
            raise Refused(str(error)) from error
        return self._service.starting_step - 1 if self._service.resumed else -1

    def log(self, step: int, time: float, metrics: Mapping[str, float], alerts: Iterable[Alert]) -> None:
        self._service.log({**metrics, "_timestamp": time}, step=step)
        for alert in alerts:
            self._service.alert(title=alert.rule, text=alert.message, level=_LEVELS.get(alert.severity, "ERROR"))

    def settle(self, last: LedgerLine | None) -> None:  # noqa: ARG002  (the SDK writes by itself)
        if self.is_offline:
            current = Path(self._service.dir).parent
            remove_earlier(current, f"offline-run-*-{self._run.run_id}")

    def finish(self) -> None:
        self._service.finish()

"""SwanLab: its cloud, its local dashboard, or files for `swanlab sync`.

Offline it keeps the first value of a step, in its dashboard the last. So, like with W&B, every process writes all of
the run anew and then removes what earlier ones left. In the cloud the SDK itself drops the steps that the service has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import swanlab
from pydantic import ValidationError
from swanlab.exceptions import AuthenticationError

from megarl.trackers.backend import Refused, TrackedRun, answers, remove_earlier, revealed
from megarl.trackers.tail import Alert, LedgerLine

_CLOUD = "https://swanlab.cn"


class ToSwanlab:
    """One SwanLab experiment, under the run's own id."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        mode = run.kwargs.get("mode") or os.environ.get("SWANLAB_MODE", "cloud")
        self._mode = "online" if mode == "cloud" else mode
        self._log_dir = Path(run.kwargs.get("logdir") or run.own_directory / "swanlab")
        self._name: str = run.kwargs.get("experiment_name", run.config.run.name)
        self._board: Any = None
        self._is_settled = False

    def start(self) -> int:
        kwargs = revealed(self._run.kwargs)
        if self._mode == "online":
            self._log_in(kwargs.get("login_kwargs", {}))
        if self._mode == "local":
            from megarl.trackers.swanlab_board import Board  # it needs the package of the dashboard

            self._board = Board()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._experiment: Any = swanlab.init(
                # with the board as its callback, `offline` writes what `local` would
                mode="offline" if self._board else self._mode,
                callbacks=[self._board] if self._board else None,
                log_dir=str(self._log_dir),
                id=self._run.run_id,
                resume="allow" if self._mode == "online" else None,
                project=kwargs.get("project", "megarl"),
                name=self._name,
                config=self._run.description(),
                settings=_private_settings(),
                **{key: kwargs[key] for key in ("workspace", "description", "tags") if key in kwargs},
            )
        except (ValidationError, ValueError) as error:
            raise Refused(str(error)) from None
        return -1

    def log(self, step: int, time: float, metrics: Mapping[str, float], alerts: Iterable[Alert]) -> None:  # noqa: ARG002
        self._experiment.log(dict(metrics), step=step)
        text = "\n".join(f"{alert.rule} (severity {alert.severity}): {alert.message}" for alert in alerts)
        if text:
            self._experiment.log({"alerts": swanlab.Text(text)}, step=step)

    def settle(self, last: LedgerLine | None) -> None:  # noqa: ARG002  (the SDK writes by itself)
        if self._board is not None:
            self._board.raise_failure()
            if not self._is_settled:
                self._board.forget_earlier(self._run.run_id, self._name)
        self._is_settled = True
        if self._mode != "online":
            remove_earlier(Path(self._experiment.dir), f"run-*-{self._run.run_id}")

    def finish(self) -> None:
        self._experiment.finish()
        if self._board is not None:
            self._board.raise_failure()

    def _log_in(self, login_kwargs: Mapping[str, Any]) -> None:
        try:
            swanlab.login(save=False, **login_kwargs)
        except AuthenticationError as error:
            # SwanLab blames the key also when it cannot reach the server.
            if answers(login_kwargs.get("host", _CLOUD)):
                raise Refused(str(error)) from error
            raise


def _private_settings() -> Any:
    """Nothing but the metrics and the configuration: no command line, no host, no packages, no git, no console."""
    off = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False)
    return swanlab.Settings(
        interactive=False,
        probe=swanlab.Settings.Probe(**off),
        terminal=swanlab.Settings.Terminal(proxy_type="none"),
    )

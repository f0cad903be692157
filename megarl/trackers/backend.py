"""What a tracking service has to offer, and what it gets to know about the run."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megarl.config.schema import RunConfig
from megarl.config.secret_names import is_secret_key
from megarl.config.tracking import kwargs_of
from megarl.core.secret import Secret, is_reference, resolve
from megarl.trackers.sinks import Sink, in_order, spelling_for
from megarl.trackers.tail import Alert, LedgerLine


class Refused(Exception):
    """The service will never take this run as it is: a bad key, an option that it does not know."""


class Backend(Protocol):
    """One tracking service. Calls may block or raise: they are made in a process that has nothing else to do."""

    def start(self) -> int:
        """Open the run. The last step that the service has for good, so that it need not be given again; else -1."""

    def log(self, step: int, time: float, metrics: Mapping[str, float], alerts: Iterable[Alert]) -> None:
        """Give one step, under the names and in the order of this service."""

    def settle(self, last: LedgerLine | None) -> None:
        """The service has been given all that the ledger holds now, up to ``last``."""

    def finish(self) -> None:
        """Close the run; all of it is with the service, or on the disk, afterwards."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as its trackers see it."""

    directory: Path
    config: RunConfig
    sink: Sink
    # every secret that was looked up, so that messages can be scrubbed of them
    secrets: list[Secret] = field(default_factory=list)

    @property
    def ledger(self) -> Path:
        """One JSON object per step."""
        return self.directory / "metrics.jsonl"

    @property
    def own_directory(self) -> Path:
        """What the trackers of this run keep."""
        return self.directory / "trackers"

    @cached_property
    def kwargs(self) -> dict[str, Any]:
        """The options of this tracker. Secrets are looked up now, and are of the type `Secret`."""
        options = kwargs_of(self.sink, self.config.tracker_kwargs)
        return {key: self._resolved(key, value) for key, value in options.items() if value is not None}

    @cached_property
    def run_id(self) -> str:
        """Names the run in every service, across restarts: made once, and kept in the run directory."""
        return (self.directory / "run_id").read_text(encoding="ascii")

    @cached_property
    def devices(self) -> list[dict[str, Any]]:
        """The device table, if the run has written one."""
        path = self.directory / "devices.json"
        table: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.is_file() else []
        return table

    def description(self) -> dict[str, Any]:
        """What services show as the run's configuration: every setting, and the devices. Secrets are references."""
        return self.config.model_dump(mode="json") | {"devices": self.devices}

    def spell(self, line: LedgerLine) -> dict[str, float]:
        """The metrics of a step in the names and the order of this tracker."""
        return in_order(self._spelling.spell(line.metrics))

    @cached_property
    def _spelling(self) -> Any:
        return spelling_for(self.config, self.sink)

    def _resolved(self, key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: self._resolved(inner, child) for inner, child in value.items()}
        if is_secret_key(key) and isinstance(value, str) and is_reference(value):
            self.secrets.append(resolve(value))
            return self.secrets[-1]
        return value


def revealed(value: Any) -> Any:
    """Options as a service wants them: with the text of the secrets."""
    if isinstance(value, Mapping):
        return {key: revealed(child) for key, child in value.items()}
    return value.reveal() if isinstance(value, Secret) else value


def answers(url: str, seconds: float = 5.0) -> bool:
    """Whether there is a working server behind the address: one that answers, be it with a refusal."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False
    return True


def remove_earlier(current: Path, pattern: str) -> None:
    """Remove what earlier processes wrote of this run beside ``current``, which holds all of it now.

    W&B marks a directory that was uploaded; the run is in the cloud then, and the directory is the user's.
    """
    for path in current.parent.glob(pattern):
        if path.name != current.name and not any(path.glob("*.synced")):
            shutil.rmtree(path, ignore_errors=True)  # what a dying process still holds goes the next time


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is whole or as before."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)

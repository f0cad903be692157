"""Where metrics go beside the ledger: ``track_with`` and ``tracker_kwargs``, in ROLL's spelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

TrackerName = Literal["stdout", "stdout_json", "tensorboard", "wandb", "swanlab"]
TRACKERS: tuple[str, ...] = get_args(TrackerName)
# Trackers that have packages of their own, and follow the ledger in processes of their own.
SERVICES = ("tensorboard", "wandb", "swanlab")


def _as_list(value: Any) -> Any:
    """``swanlab`` is short for ``[swanlab]``; nothing is short for none."""
    if value is None or value == "":
        return []
    return [value] if isinstance(value, str) else value


TrackWith = Annotated[list[TrackerName], BeforeValidator(_as_list)]
TrackerKwargs = dict[str, Any]


def services_of(track_with: Sequence[str]) -> list[str]:
    """Those of the trackers that have processes of their own."""
    return [name for name in track_with if name in SERVICES]


def is_keyed(tracker_kwargs: Mapping[str, Any]) -> bool:
    """Whether the options are given by tracker; if not, they are the options of the only one."""
    return bool(tracker_kwargs) and all(key in TRACKERS for key in tracker_kwargs)


def kwargs_of(tracker: str, tracker_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one of the run's trackers."""
    options = tracker_kwargs.get(tracker) if is_keyed(tracker_kwargs) else tracker_kwargs
    return dict(options or {})

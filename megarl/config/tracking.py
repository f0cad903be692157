"""Where metrics go beside the ledger: ``track_with`` and ``tracker_kwargs``, in ROLL's spelling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

TrackerName = Literal["stdout", "stdout_json", "tensorboard", "wandb", "swanlab"]


def _as_list(value: Any) -> Any:
    """``swanlab`` is short for ``[swanlab]``; nothing is short for none."""
    if value is None or value == "":
        return []
    return [value] if isinstance(value, str) else value


TrackWith = Annotated[list[TrackerName], BeforeValidator(_as_list)]
TrackerKwargs = dict[str, Any]

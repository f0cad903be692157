"""Ranks train together only if they would do the same: one configuration, and one installation."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from megarl import __version__
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.run.changes import changes_between, shown

if TYPE_CHECKING:
    from megarl.models.rendezvous import Meeting

_PACKAGES = ("torch", "megatron-core")
_MAX_NAMED = 10


def terms(config: RunConfig) -> dict[str, Any]:
    """What must be the same in all ranks; nothing in it may depend on the machine."""
    versions = {f"version of {name}": version for name, version in own_versions().items()}
    return {**versions, **config.model_dump(mode="json")}


def own_versions() -> dict[str, str]:
    """Of the packages on which numbers, and messages between ranks, depend."""
    return {"megarl": __version__, **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a copy of its sources
        return "not installed"


def require_agreement(meeting: Meeting, own: dict[str, Any]) -> None:
    """Wait for everybody, and refuse to go on, in all ranks alike, if somebody has other terms. Collective."""
    meeting.leave_note(f"terms/{meeting.rank}", own)
    roll = meeting.call_the_roll()
    others = [rank for rank, one in enumerate(roll) if one.digest != roll[0].digest]
    if not others:
        return
    first, other = meeting.read_notes([f"terms/{rank}" for rank in (0, others[0])])
    differences = [
        f"    {key}: rank 0 has {shown(before)}, rank {others[0]} has {shown(after)}"
        for key, before, after in changes_between(first, other)
    ]
    places = ", ".join(f"rank {rank} on {roll[rank].host}" for rank in others[:_MAX_NAMED])
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    listing = "\n".join(differences[:_MAX_NAMED] + ["    and more"] * (len(differences) > _MAX_NAMED))
    meeting.part()
    raise ConfigError(
        "MRL-1607",
        f"{places}{more} would not train the same run as rank 0 on {roll[0].host}:\n{listing}\n"
        "Start all ranks with the same configuration file, the same settings on the command line, and the same "
        "versions of the packages.",
    )

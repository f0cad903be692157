"""``megarl track``: give a run that is over to its trackers, or to others than it had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.config.load import load_config
from megarl.config.tracker_check import require_trackers
from megarl.config.tracking import services_of
from megarl.core.errors import ConfigError, MissingInputError, StorageError
from megarl.run.directory import hold
from megarl.trackers.followers import Followers, Patience
from megarl.trackers.ledger import read_ledger

# Somebody is watching and can press Ctrl-C: an upload may take its time.
_PATIENCE = Patience(to_be_ready=300.0, to_leave=300.0)


def track_run(run: Path, overrides: Sequence[str]) -> str:
    """Deliver everything that the ledger holds; what it says to the user. Refused while the run is alive."""
    if not (run / "resolved.yaml").is_file():
        raise MissingInputError(
            "MRL-4301", f"{run} is not a run directory: there is no resolved.yaml in it.\nName one, such as runs/NAME."
        )
    config = load_config(run / "resolved.yaml", overrides)
    trackers = services_of(config.track_with)
    if not trackers:
        raise ConfigError(
            "MRL-1017", f"{run} has no tracker to give it to.\nName one: megarl track {run} track_with=tensorboard"
        )
    require_trackers(config)
    with hold(run.resolve()):
        num_steps = len(read_ledger(run / "metrics.jsonl"))
        followers = Followers(run, trackers, _PATIENCE, overrides)
        followers.await_ready()
        followers.finish()
    if not followers.all_delivered:
        raise StorageError("MRL-7303", f"{run} was not delivered to every tracker; what is missing is said above.")
    return f"All {num_steps} records of {run} are with {' and '.join(trackers)}.\n"

"""A rank with its guard and nothing else: no torch, no training. Started by `test_launch_watch.py`.

``python -m tests.unit.guarded_rank RANK SIZE HANG_TIMEOUT DIRECTORY BEHAVIOUR``; ranks meet in the directory.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

from megarl.core import whereabouts
from megarl.launch.guard import start_guard
from megarl.launch.rendezvous import local_record


def main() -> None:
    rank, size, timeout, directory, behaviour = sys.argv[1:]
    place = Path(directory)
    record = local_record(int(rank), int(size), 1, 0)
    line = start_guard(record, "127.0.0.1", float(timeout), join_timeout=1.0)
    line.open_stacks(place / f"stacks_rank_{rank}.txt")
    if rank == "0":
        (place / "hub.draft").write_text(json.dumps(line.where_the_watch_listens()))
        (place / "hub.draft").rename(place / "hub")
    while not (place / "hub").exists():
        time.sleep(0.01)
    whereabouts.tell({"hub": json.loads((place / "hub").read_text()), "logs": "logs"})
    whereabouts.begin_step(7)
    whereabouts.enter("actor_train/train_step")
    (place / f"ready_{rank}").write_text(str(os.getpid()))
    if behaviour == "done":
        line.leave(None, 0)
        return
    if behaviour == "fails":
        line.leave("MRL-2102 the reward failed", 65)
        os._exit(65)
    while behaviour == "works" or not (place / "enough").exists():
        whereabouts.tick()
        time.sleep(0.05)
    if behaviour == "stuck":  # no other thread gets to run
        re.match("(a+)+$", "a" * 60 + "b")
    time.sleep(1000)


main()

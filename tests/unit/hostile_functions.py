"""Reward functions that do their worst. Each answers 1 to "fine": what an innocent neighbour of the attack gets.

Only for worker processes. Importing this module does nothing.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.sample import Prompt, Sample
from megarl.rewards import Reward

LONG = 1000.0


def attack(prompt: Prompt, sample: Sample) -> Any:
    """Do what the response says."""
    return 1.0 if sample.response == "fine" else ATTACKS[sample.response](prompt, sample)


async def async_attack(prompt: Prompt, sample: Sample) -> Any:
    """The same in an async function, with some waiting."""
    import asyncio

    await asyncio.sleep(0.01)
    if sample.response == "wait":
        await asyncio.sleep(LONG)
    return attack(prompt, sample)


def _loop(*_: Any) -> None:
    while True:
        pass


def _loop_without_signals(*_: Any) -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    _loop()


def _sleep(*_: Any) -> None:
    time.sleep(LONG)


def _recurse(*arguments: Any) -> float:
    return 1.0 + _recurse(*arguments)


def _recurse_in_c(*_: Any) -> None:
    sys.setrecursionlimit(10**9)
    nested: list[Any] = []
    for _level in range(10**7):
        nested = [nested]
    repr(nested)


def _many_forks(*_: Any) -> None:
    for _child in range(200):
        if os.fork() == 0:
            time.sleep(LONG)
    time.sleep(LONG)


def _fork_bomb(*_: Any) -> None:
    while True:
        os.fork()


def _leave_daemon(*_: Any) -> float:
    """A child of a child in a session of its own, which nobody waits for."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep({LONG})"])
        os._exit(0)
    return 0.5


def _allocate(*_: Any) -> int:
    return len(bytearray(10 << 30))


def _allocate_shared(*_: Any) -> int:
    import mmap

    return len(mmap.mmap(-1, 10 << 30))


def _exit_hard(*_: Any) -> None:
    os._exit(0)


def _exit_soft(*_: Any) -> None:
    sys.exit(3)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _abort(*_: Any) -> None:
    os.abort()


def _crash(*_: Any) -> None:
    ctypes.string_at(0)


def _close_streams(*_: Any) -> float:
    """Whoever prints after this fails; the reward itself is fine."""
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    return 0.5


def _close_everything(*_: Any) -> float:
    os.closerange(0, 1024)
    return 0.5


def _print_gigabyte(*_: Any) -> float:
    for _mebibyte in range(1024):
        os.write(1, b"x" * (1 << 20))
    return 0.5


def _write_to_all_descriptors(*_: Any) -> float:
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, (30).to_bytes(4, "big") + b"\x00" * 8 + b'{"value": 7.0, "scores":{}}')
        except OSError:
            continue
    return 0.5


def _signal_itself(number: int) -> Callable[..., float]:
    def send(*_: Any) -> float:
        os.kill(os.getpid(), number)
        time.sleep(LONG)
        return 0.5

    return send


def _signal_parent(*_: Any) -> float:
    """The parent is our own first process of the namespace, which nobody inside can end."""
    os.kill(os.getppid(), signal.SIGKILL)
    return 0.5


def _signal_group(*_: Any) -> None:
    os.kill(0, signal.SIGKILL)
    time.sleep(LONG)


def _signal_everybody(*_: Any) -> None:
    """Only where it cannot hurt: as the second process of a namespace."""
    assert os.getpid() < 10, "not in a namespace of its own"
    os.kill(-1, signal.SIGKILL)


def _slow_pattern(*_: Any) -> bool:
    return bool(re.fullmatch(r"(a|a)*b", "a" * 60))


def _mutate(prompt: Prompt, sample: Sample) -> float:
    sample.response = "changed"
    sample.token_ids[:] = -1
    sample.reward = 1e9
    prompt.metadata["planted"] = 1  # type: ignore[index]
    return 0.5


def _ruin_directory(*_: Any) -> float:
    shutil.rmtree(os.getcwd())
    os.chdir("/")
    return 0.5


def _ruin_environment(*_: Any) -> float:
    os.environ.clear()
    sys.path.clear()
    return 0.5


def _leave_threads(*_: Any) -> float:
    for _thread in range(20):
        threading.Thread(target=time.sleep, args=(LONG,)).start()
    return 0.5


def _patch_json(*_: Any) -> float:
    json.dumps = json.loads = None  # type: ignore[assignment]
    return 0.5


def _patch_builtins(*_: Any) -> float:
    builtins.len = builtins.isinstance = None  # type: ignore[assignment]
    return 0.5


def _patch_itself(*_: Any) -> float:
    """Later calls in this process fail; the neighbours must not notice."""
    globals()["ATTACKS"] = None
    globals()["attack"].__code__ = (lambda prompt, sample: 1 / 0).__code__
    return 0.5


def _read_secret(*_: Any) -> float:
    """How many secrets can be found, in the environment or in that of other processes."""
    places = [dict(os.environ).__repr__().encode()]
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            places.append(place.read_bytes())
        except OSError:
            continue
    return float(sum(b"very-secret-value" in place for place in places))


def _raise_badly(*_: Any) -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    raise Bad


def _give(value: Any) -> Callable[..., Any]:
    return lambda *_: value


ATTACKS: dict[str, Callable[..., Any]] = {
    "loop": _loop,
    "loop without signals": _loop_without_signals,
    "sleep": _sleep,
    "slow pattern": _slow_pattern,
    "recurse": _recurse,
    "recurse in C": _recurse_in_c,
    "many forks": _many_forks,
    "fork bomb": _fork_bomb,
    "leave daemon": _leave_daemon,
    "allocate": _allocate,
    "allocate shared": _allocate_shared,
    "exit hard": _exit_hard,
    "exit soft": _exit_soft,
    "interrupt": _interrupt,
    "abort": _abort,
    "crash": _crash,
    "close streams": _close_streams,
    "close everything": _close_everything,
    "print a gigabyte": _print_gigabyte,
    "write to all descriptors": _write_to_all_descriptors,
    "SIGKILL to itself": _signal_itself(signal.SIGKILL),
    "SIGSTOP to itself": _signal_itself(signal.SIGSTOP),
    "SIGKILL to its parent": _signal_parent,
    "SIGKILL to its group": _signal_group,
    "SIGKILL to everybody": _signal_everybody,
    "mutate": _mutate,
    "ruin directory": _ruin_directory,
    "ruin environment": _ruin_environment,
    "leave threads": _leave_threads,
    "patch json": _patch_json,
    "patch builtins": _patch_builtins,
    "patch itself": _patch_itself,
    "read secrets": _read_secret,
    "raise badly": _raise_badly,
    "NaN": _give(math.nan),
    "infinite": _give(-math.inf),
    "None": _give(None),
    "text": _give("1.0"),
    "bool": _give(True),
    "list": _give([1.0]),
    "nested": _give([[1.0], [2.0]]),
    "array": _give(np.array(1.0)),
    "huge number": _give(10**400),
    "huge text": _give("x" * (100 << 20)),
    "huge scores": _give(Reward(1.0, {f"score{i}": 1.0 for i in range(100_000)})),
    "odd scores": _give(Reward(1.0, {"a/b\n": 1.0})),
}

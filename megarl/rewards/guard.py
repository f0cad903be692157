"""What a worker process lives in: nothing that a reward starts can outlive it, flood the disk or reach the trainer.

The process that the driver starts never runs a reward. It is the *guard*: it makes a namespace of processes, lets a
first process and in it the worker begin there, swallows what the worker prints, counts its processes, and ends all of
them at once when the driver says so or is gone. A process in a namespace cannot see, signal or survive what is
outside; the kernel ends every process of a namespace with its first one. Where namespaces are not allowed, the guard
adopts orphans instead and ends them one by one: then a reward could still signal other processes of its user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

Isolation = Literal["process namespace", "process tree"]

# exit codes of a guard; a worker's own code, or 128 + its signal, is passed on
TOO_MANY_PROCESSES = 250
STOPPED = 251
BROKEN = 252

MAX_PROCESSES = 64
_MAX_LOG_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 30
_MAX_OPEN_FILES = 1024
_POLL_MS = 50
_COUNT_SECONDS = 1.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
_MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x4000, 0x40000, 2, 4, 8

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the driver says when it starts a guard, as JSON on the command line."""

    driver: int
    requests: int
    replies: int
    memory_bytes: int
    # where the worker's output goes, up to a mebibyte; empty: nowhere
    log: str = ""


def guard(terms: Terms, work: Callable[[Isolation], None]) -> NoReturn:
    """Run ``work`` in a worker process, and watch over it until it ends. Only of a process without threads."""
    if not end_with_parent(terms.driver, signal.SIGTERM):
        _remove_own_directory()
        os._exit(STOPPED)
    isolation = _isolate()
    if isolation == "process tree":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    output, printed = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(output)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if isolation == "process namespace":
            _hide_other_processes()
            worker = os.fork()
            if worker:
                _be_first_process(worker, (terms.requests, terms.replies, printed))
        _be_worker(terms, printed)
        _work_to_the_end(work, isolation)
    for descriptor in (printed, terms.requests, terms.replies):
        os.close(descriptor)
    os._exit(_Watch(first, isolation, output, terms.log).until_the_end())


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Have this process sent a signal when its parent's thread ends. False: it was gone before we could ask."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def _work_to_the_end(work: Callable[[Isolation], None], isolation: Isolation) -> NoReturn:
    """Threads that a reward left do not keep the worker alive."""
    try:
        work(isolation)
        os._exit(0)
    except BaseException:
        traceback.print_exc()  # to the log
        os._exit(BROKEN)


class _Watch:
    """The guard's life after the worker has begun."""

    def __init__(self, first: int, isolation: Isolation, output: int, log: str) -> None:
        self._first = first
        self._isolation = isolation
        self._output = output
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if log else -1
        self._is_stopped = False
        self._next_count = time.monotonic() + _COUNT_SECONDS
        self._poller = select.poll()
        self._poller.register(output, select.POLLIN)
        os.set_blocking(output, False)
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        self._poller.register(wake, select.POLLIN)
        self._wake = wake
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)

    def until_the_end(self) -> int:
        code = 0
        while True:
            for descriptor, _ in self._poller.poll(_POLL_MS):
                self._take(descriptor)
            done, status = os.waitpid(self._first, os.WNOHANG)
            if done:
                code = code or _exit_code(status)
                break
            if self._is_stopped:
                code = STOPPED
            elif self._has_too_many():
                code = TOO_MANY_PROCESSES
            if code:
                os.kill(self._first, signal.SIGKILL)
        if self._isolation == "process tree":
            _end_orphans()
        while self._take(self._output):  # the last words
            pass
        _remove_own_directory()
        return code

    def _take(self, descriptor: int) -> bool:
        """Read what is there; keep the beginning of what the worker printed. Whether there was anything."""
        try:
            printed = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not printed:
            with contextlib.suppress(KeyError):
                self._poller.unregister(descriptor)
        elif descriptor == self._output and self._log >= 0:
            room = _MAX_LOG_BYTES - os.fstat(self._log).st_size
            with contextlib.suppress(OSError):  # a full disk is no reason to stop
                os.write(self._log, printed[: max(0, room)])
        return bool(printed)

    def _has_too_many(self) -> bool:
        """Looked at every second: it takes a look at every process of the machine. A first process looks more often."""
        if time.monotonic() < self._next_count:
            return False
        self._next_count = time.monotonic() + _COUNT_SECONDS
        return len(_descendants(self._first)) > MAX_PROCESSES

    def _stop(self, *_: Any) -> None:
        self._is_stopped = True


def _remove_own_directory() -> None:
    """The one that the driver made for the worker, and started the guard in; the driver may be gone."""
    shutil.rmtree(os.getcwd(), ignore_errors=True)


def _isolate() -> Isolation:
    """The processes to come live in a namespace of their own, if the system allows."""
    if os.geteuid() == 0 and _libc.unshare(_CLONE_NEWPID) == 0:
        return "process namespace"
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWPID | _CLONE_NEWUSER) != 0:
        return "process tree"
    with contextlib.suppress(OSError):  # without the map the worker is nobody, and reads what everybody may
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    return "process namespace"


def _hide_other_processes() -> None:
    """A /proc that shows this namespace only: the trainer's environment, secrets included, is not to be read there."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        return
    _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)


def _be_first_process(worker: int, descriptors: tuple[int, ...]) -> NoReturn:
    """Collect whoever ends in the namespace, count them, and end with the worker: the kernel then ends the rest."""
    for descriptor in descriptors:
        os.close(descriptor)
    sees_own = os.readlink("/proc/self") == str(os.getpid())
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    while True:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done == worker:
            os._exit(_exit_code(status))
        if sees_own and sum(name.isdigit() for name in os.listdir("/proc")) > MAX_PROCESSES:
            os._exit(TOO_MANY_PROCESSES)
        if not done:
            signal.sigtimedwait((signal.SIGCHLD,), _POLL_MS / 1000)


def _be_worker(terms: Terms, printed: int) -> None:
    """A session of its own, limits, and nothing behind stdin, stdout and stderr that could block or overflow."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(nothing)
    os.close(printed)
    for kind, most in (
        (resource.RLIMIT_AS, terms.memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # if the machine runs out of memory, a worker goes before the trainer


def _descendants(process: int) -> set[int]:
    """The processes below one, by a look at all of them."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            # behind the program's name, which may hold anything, come the state and the parent
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    unseen = [process]
    while unseen:
        below = children.get(unseen.pop(), [])
        found.update(below)
        unseen += below
    return found


def _end_orphans() -> None:
    """End what the worker left; orphans have become the guard's children."""
    while True:
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code

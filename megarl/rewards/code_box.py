"""A script that `code_run` starts with ``python -I``: it shuts itself in, then runs an answer and one test of it.

It imports nothing of megarl. Descriptors: ``task`` holds what to do as JSON, ``result`` takes the level of isolation,
and after a passed test the nonce. An answer that ends the process, prints or raises does not get that far. The nonce is
in this process's memory, so an answer that searches the memory for it can forge a pass: see docs/rewards.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NEW_MOUNTS, _NEW_IPC, _NEW_USERS, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_REC_PRIVATE, _MS_REC_BIND, _MS_NOSUID_NODEV = 0x4000 | 0x40000, 0x4000 | 0x1000, 2 | 4
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534
_MAX_PROCESSES, _MAX_OPEN_FILES = 64, 64
_SCRATCH_BYTES = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def main(task: int, result: int) -> None:
    """Never returns to a caller that matters: the process is this function."""
    with os.fdopen(task, "rb") as file:
        request = json.load(file)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    level = _enter_namespaces()
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "namespaces" in level:
        _go_on_in_child()  # which is process 1 of the namespace: the kernel ends all others with it
        _mount(level)
        _go_on_in_child()  # process 1 ignores signals that limits send
    level += _become_nobody()
    # whoever makes a namespace may do everything in it, also undo the mounts
    _libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    _limit(request)
    _write("answer.py", request.pop("code"))
    os.write(result, f"{level}\n".encode())  # all is prepared: what fails from here on, the answer failed
    os.set_inheritable(result, False)
    _run(request, result)


def _go_on_in_child() -> None:
    """The parent waits for the child and ends with it."""
    child = os.fork()
    if child:
        while os.wait()[0] != child:
            pass
        os._exit(0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _enter_namespaces() -> str:
    """No network, no other processes, no other mounts: if the system allows."""
    wanted = _NEW_MOUNTS | _NEW_IPC | _NEW_PROCESSES | _NEW_NETWORK
    if os.geteuid() == 0 and _libc.unshare(wanted) == 0:
        return "namespaces"
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(wanted | _NEW_USERS) != 0:
        return "limits only"
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        except OSError:
            pass  # then it is nobody there
    return "namespaces of a user"


def _mount(level: str) -> None:
    """Everything read-only, but for a small scratch directory in memory; and a /proc of these processes only."""
    # a directory that nobody may enter, whatever TMPDIR is, and in which no interpreter is installed
    scratch = b"/dev/shm" if os.path.isdir("/dev/shm") else os.getcwd().encode()
    _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
    if os.getuid() == 0:
        _show_interpreter()
    os.makedirs(scratch, exist_ok=True)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    made = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    options = f"size={_SCRATCH_BYTES},mode=0777".encode()
    made |= _libc.mount(b"tmpfs", scratch, b"tmpfs", _MS_NOSUID_NODEV, options)
    _libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV, None)
    if made != 0:
        sys.exit(f"{level}: the file system cannot be made read-only")
    os.chdir(scratch)
    os.environ["HOME"] = os.getcwd()


def _show_interpreter() -> None:
    """Where only root may enter the directory that Python is in, show nobody that directory with nothing but Python."""
    for place in dict.fromkeys((sys.base_prefix, sys.prefix)):
        above = [place[:i] for i, letter in enumerate(place) if letter == "/" and i]
        closed = next((path for path in above if not os.stat(path).st_mode & 0o001), None)
        if closed:
            descriptor = os.open(place, os.O_PATH)
            _libc.mount(b"tmpfs", closed.encode(), b"tmpfs", _MS_NOSUID_NODEV, b"mode=0755")
            os.makedirs(place)
            _libc.mount(f"/proc/self/fd/{descriptor}".encode(), place.encode(), None, _MS_REC_BIND, None)
            os.close(descriptor)


def _become_nobody() -> str:
    """Of root nothing is left, unless the interpreter's own files are root's secret."""
    if os.geteuid() != 0 or os.getuid() != 0:
        return ""
    try:
        os.setgroups([])
        os.seteuid(_NOBODY)
        needed = ((os.__file__, os.R_OK), (os.getcwd(), os.W_OK | os.X_OK))
        can_live = all(os.access(path, mode, effective_ids=True) for path, mode in needed)
        os.seteuid(0)
        if not can_live:
            return ", as root"
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:  # in a user namespace there may be no nobody
        return ", as root"
    return ", as nobody"


def _limit(request: dict[str, Any]) -> None:
    cpu_seconds = int(request["seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["output_bytes"]),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, _MAX_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _run(request: dict[str, Any], result: int) -> None:
    """The answer as a program; then the test in the answer's names; then, and only then, the nonce."""
    nonce = request.pop("nonce")
    names = runpy.run_path("answer.py", run_name="__main__")
    told = ""
    if request["expression"]:
        _write("test.py", f"_value_ = (\n{request['expression']}\n)")
        told = repr(_plain(runpy.run_path("test.py", names, "__main__")["_value_"]))
    elif request["statements"]:
        _write("test.py", request["statements"])
        runpy.run_path("test.py", names, "__main__")
    else:
        return  # what it printed is all that counts
    os.write(result, f"{nonce}{told}".encode())
    os._exit(0)


def _write(name: str, text: str) -> None:
    """By its whole path, which is how it will be read."""
    with open(os.path.join(os.getcwd(), name), "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _plain(value: Any) -> Any:
    """The value as plain Python, so that its text can be read back: no subclasses, no numpy."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        value = set(value)
    for many in (list, tuple, set):
        if isinstance(value, many):
            return many(_plain(item) for item in value)
    one: Any
    for one in (bool, int, float, complex, str, bytes):
        if isinstance(value, one):
            return one(value)
    return value


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

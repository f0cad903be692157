"""Memory that another process on this machine can open by name, and that vanishes with the process that made it.

It is an anonymous file of the kernel: there is no directory entry that could be left behind, not even by SIGKILL.
Others of the same user open it as ``/proc/PID/fd/N``. It is sealed against shrinking, so that a reader's mapping stays
valid.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

NAME = "megarl-weights"


class MemoryFile:
    """A flat buffer of ``num_bytes`` bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, num_bytes)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._mapping = mmap.mmap(self._file, num_bytes)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """How others open it, as long as this process lives and `close` was not called."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Give the memory back, as soon as nobody maps it any more."""
        os.close(self._file)
        # the mapping itself goes with the last tensor that views it
        del self.bytes
        del self._mapping

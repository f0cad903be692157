"""Becomes another program, which ends when the process that started it ends, however that happens.

Executed by path: ``python tied.py PARENT_PID PROGRAM ARGUMENT...``. The kernel is asked to send the signal (it keeps
the request when the process becomes another program), since a trainer that is killed can tell nobody.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the program."""
    parent, *program = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"the kernel refuses to tie this process to its parent: errno {ctypes.get_errno()}")
    # The parent may have ended before the kernel knew of the wish.
    if os.getppid() == int(parent):
        try:
            os.execv(program[0], program)
        except OSError as error:
            sys.exit(f"{program[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()

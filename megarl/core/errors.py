"""Errors that are the user's to mend, each with its documented exit code.

Everything that is raised as a :class:`MegarlError` is printed as one message without a traceback; anything else is an
internal error (exit code 70). The first line of a message says what is wrong and where, the following lines say what is
allowed and what to write instead.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_INTERNAL = 70


class MegarlError(Exception):
    """Base class: a stable code (``MRL-1001``) and the exit code that the process ends with."""

    exit_code = EXIT_INTERNAL

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code} {message}")
        self.code = code


class ConfigError(MegarlError):
    """The configuration or the command line is wrong. Codes MRL-1xxx."""

    exit_code = 64


class DataError(MegarlError):
    """A dataset row, a reward or a number is wrong. Codes MRL-2xxx (data, rewards) and MRL-3xxx (numerics)."""

    exit_code = 65


class MissingInputError(MegarlError):
    """A file or directory that the run needs is not there. Codes MRL-4xxx."""

    exit_code = 66


class EngineError(MegarlError):
    """Generation engines cannot serve. Codes MRL-5xxx."""

    exit_code = 69


class RunDirInUseError(MegarlError):
    """Another run, still alive, owns the run directory. Codes MRL-6xxx."""

    exit_code = 73


class StorageError(MegarlError):
    """The disk is full or refuses to be written. Codes MRL-7xxx."""

    exit_code = 74


class Preempted(MegarlError):
    """The run was asked to stop, saved everything and can go on later. Codes MRL-8xxx."""

    exit_code = 75


class PreemptedIdle(Preempted):
    """Asked to stop before this start had finished a step: the same start again may get no further. Code MRL-8002."""

    exit_code = 76

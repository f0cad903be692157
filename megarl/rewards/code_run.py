"""Running an answer with one test, in a process that is shut in by `code_box` and ended whole.

The expected result never enters that process where that can be avoided: what a program printed, and the value of
``f(2)`` in ``assert f(2) == 3``, are compared here.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from megarl.core.errors import DataError
from megarl.core.excerpt import excerpt

MAX_OUTPUT_BYTES = 1 << 20
_BOX = Path(__file__).with_name("code_box.py")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold after the answer ran: exactly one of three."""

    # statements that must not raise
    statements: str = ""
    # an expression, and the value that it must have
    expression: str = ""
    value: Any = None
    # what the answer reads, and must print
    stdin: str | None = None
    stdout: str = ""

    @classmethod
    def from_statements(cls, text: str) -> Check:
        """``assert EXPRESSION == LITERAL`` is taken apart, so that the answer's process does not learn the literal."""
        try:
            body = ast.parse(text.strip()).body
            if len(body) == 1 and isinstance(body[0], ast.Assert) and isinstance(body[0].test, ast.Compare):
                compare = body[0].test
                if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
                    return cls(expression=ast.unparse(compare.left), value=ast.literal_eval(compare.comparators[0]))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
        return cls(statements=text)


def passes(code: str, test: Check, seconds: float, memory_bytes: int) -> bool:
    """Whether the answer passes the test. However it ends, nothing of it is left running."""
    nonce = secrets.token_hex(16)
    request = {
        "code": code, "statements": test.statements, "expression": test.expression, "nonce": nonce,
        "seconds": seconds, "memory_bytes": memory_bytes, "output_bytes": MAX_OUTPUT_BYTES,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="megarl-code-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile() as task,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as result,
        tempfile.TemporaryFile() as stderr,
    ):
        Path(scratch).chmod(0o777)  # the answer may run as another user
        task.write(json.dumps(request).encode())
        stdin.write((test.stdin or "").encode(errors="replace"))
        for file in (task, stdin):
            file.seek(0)
        _execute(scratch, (task, stdin, stdout, stderr, result), seconds)
        level, _, told = _read(result).partition("\n")
        if not level:  # the answer has not begun, so this is not its fault
            raise _not_shut_in(_read(stderr))
        _tell_isolation(level)
        if test.stdin is not None:
            return _lines(_read(stdout)) == _lines(test.stdout)
        if not told.startswith(nonce):
            return False
        return not test.expression or _is_value(told.removeprefix(nonce), test.value)


def _execute(scratch: str, files: tuple[IO[bytes], ...], seconds: float) -> None:
    task, stdin, stdout, stderr, result = files
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(_BOX), str(task.fileno()), str(result.fileno())],
        stdin=stdin, stdout=stdout, stderr=stderr, cwd=scratch, start_new_session=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": scratch, "OMP_NUM_THREADS": "1"},
        pass_fds=(task.fileno(), result.fileno()),
    )  # fmt: skip
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _not_shut_in(said: str) -> DataError:
    why = excerpt(said.strip().rpartition("\n")[2]) if said.strip() else "in time"
    return DataError("MRL-2187", f'reward "code": the process for an answer could not be prepared: {why}.')


def _read(file: IO[bytes]) -> str:
    """From its beginning, a little more than the answer may have written."""
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES + 1).decode(errors="replace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _is_value(text: str, value: Any) -> bool:
    try:
        return bool(ast.literal_eval(text) == value)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return False


@cache  # once per process
def _tell_isolation(level: str) -> None:
    _logger.warning('reward "code": answers run in: %s', level)

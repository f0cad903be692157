"""A trial of a conversation's function before anything is started: one rehearsal, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.errors import ConfigError, DataError, MegarlError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Prompt
from megarl.rollout.conversation import OutOfBudget
from megarl.rollout.converse import load_converse, outcome_of
from megarl.rollout.rehearsal import rehearse

# beside the time that the function itself may take: Python starts, and imports the function's module
_SECONDS_TO_START = 60.0


def try_converse(name: str, options: Mapping[str, Any], prompt: Prompt, timeout_seconds: float) -> str:
    """One line about what the function gave when the policy said the row's own answer and then nothing more.

    Raises a `MegarlError` if the function cannot be imported or called, raises or hangs. Whatever it does, it does in
    another process.
    """
    line = prompt.answer or prompt.demonstration or ""
    row = {field.name: getattr(prompt, field.name) for field in fields(prompt)}
    row |= {"token_ids": prompt.token_ids.tolist(), "metadata": dict(prompt.metadata)}
    limits = {"timeout_seconds": timeout_seconds}
    task = {"name": name, "options": dict(options), "row": row, "line": line, **limits}
    with tempfile.TemporaryDirectory(prefix="megarl-") as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "megarl.rollout.trial", str(report)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.communicate(json.dumps(task, default=str).encode(), timeout_seconds + _SECONDS_TO_START)
        except subprocess.TimeoutExpired:
            raise DataError(
                "MRL-2151", f'converse "{name}" was not imported within {_SECONDS_TO_START:g} s when it was tried.'
            ) from None
        finally:
            _end(process)
        if process.returncode == -signal.SIGALRM:
            raise DataError(
                "MRL-2151",
                f'converse "{name}" did not end within {timeout_seconds:g} s (rollout.converse.tool_timeout_seconds) '
                "when it was tried.",
            )
        if not report.is_file():
            raise DataError("MRL-2150", f'converse "{name}" ended its process when it was tried.')
        told = json.loads(report.read_text(encoding="utf-8"))
    if "code" in told:
        kind = ConfigError if told["code"].startswith("MRL-1") else DataError
        raise kind(told["code"], f"{told['text']}\n    It was tried before the start, with {excerpt(prompt.text)}.")
    return f'converse "{name}": {told["text"]} when the policy answers {excerpt(line)} to {excerpt(prompt.text)}'


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started."""
    with suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _prompt(row: Mapping[str, Any]) -> Prompt:
    """As the run would give it to the function, with its metadata and messages."""
    ids = np.array(row["token_ids"], dtype=np.int64)
    return Prompt(**{**row, "token_ids": ids, "messages": tuple(row["messages"])})


def _attempt(task: Mapping[str, Any]) -> dict[str, str]:
    try:
        converse = load_converse(task["name"], task["options"])
        signal.setitimer(signal.ITIMER_REAL, task["timeout_seconds"])  # ends this process; the import is not counted
        try:
            played = rehearse(converse.function, _prompt(task["row"]), [task["line"]], **task["options"])
        except OutOfBudget:
            return {"text": "no outcome"}
        except (Exception, SystemExit) as error:
            return {"code": "MRL-2150", "text": converse.failure(error).removeprefix("MRL-2150 ")}
        outcome = outcome_of(task["name"], played.result)
        if played.num_turns == 0:
            told = f'converse "{task["name"]}" returned without a turn of the policy; call generate(), and await it'
            return {"code": "MRL-2153", "text": f"{told} in an async def."}
    except MegarlError as error:
        return {"code": error.code, "text": str(error).removeprefix(f"{error.code} ")}
    return {"text": "no outcome" if outcome is None else f"{outcome.value:g}"}


if __name__ == "__main__":
    report = Path(sys.argv[1])
    told = json.dumps(_attempt(json.load(sys.stdin)))
    report.write_text(told, encoding="utf-8")

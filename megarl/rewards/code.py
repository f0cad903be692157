"""The share of a row's tests that the code of the response passes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.core.errors import DataError
from megarl.core.sample import Prompt, Sample
from megarl.rewards.code_run import Check, passes
from megarl.rewards.final_answer import last_words
from megarl.rewards.reward import Reward

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


def code(
    prompt: Prompt,
    sample: Sample,
    *,
    tests_key: str = "tests",
    partial: bool = False,
    timeout_seconds: float = 8.0,
    memory_gb: float = 1.0,
) -> Reward:
    """Run the last Python block of the response against the tests that the row holds under ``tests_key``.

    The reward is 1 if all tests pass, else 0; with ``partial`` it is the share of tests that pass. ``timeout_seconds``
    are for all tests together: each gets an equal share of what is left. A response without a block of Python earns 0.
    """
    tests = list(_tests(prompt, tests_key))
    text = last_python_block(last_words(sample))
    num_passed = 0
    deadline = time.monotonic() + timeout_seconds
    for i, test in enumerate(tests if text else ()):
        seconds = (deadline - time.monotonic()) / (len(tests) - i)
        num_passed += seconds > 0 and passes(text, test, seconds, int(memory_gb * 2**30))
        if not partial and num_passed <= i:
            break
    share = num_passed / len(tests)
    return Reward(share if partial else float(share == 1), {"has_code": float(bool(text))})


def last_python_block(text: str) -> str:
    """The last fenced block that says it is Python, or says nothing; empty if there is none."""
    blocks = [body for language, body in _BLOCK.findall(text) if language.lower() in ("", "python", "python3", "py")]
    return blocks[-1] if blocks else ""


def _tests(prompt: Prompt, key: str) -> Iterator[Check]:
    """Statements with asserts, or {input, output} of a program, or many of these as {inputs: [...], outputs: [...]}."""
    found = prompt.metadata.get(key)
    if isinstance(found, Mapping) and isinstance(found.get("inputs"), list) and isinstance(found.get("outputs"), list):
        pairs = zip(found["inputs"], found["outputs"], strict=False)
        is_whole = len(found["inputs"]) == len(found["outputs"])
        found = [{"input": given, "output": wanted} for given, wanted in pairs] if is_whole else None
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list) or not found:
        raise _wrong(prompt, key)
    for test in found:
        yield _test(prompt, key, test)


def _test(prompt: Prompt, key: str, test: Any) -> Check:
    if isinstance(test, str) and test.strip():
        return Check.from_statements(test)
    if isinstance(test, Mapping) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        return Check(stdin=test["input"], stdout=test["output"])
    raise _wrong(prompt, key)


def _wrong(prompt: Prompt, key: str) -> DataError:
    return DataError(
        "MRL-2182",
        f'reward "code": prompt {prompt.id!r} has no tests under {key!r}, or not in a form that is known.\n'
        'Give a list of statements ("assert add(1, 2) == 3"), or of {"input": "1 2", "output": "3"}.',
    )

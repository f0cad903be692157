"""Tasks whose problems are generated: no download, a large space of problems, and a held-out part that never leaks."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from megarl.core.sample import Prompt
from megarl.core.seeding import derive_seed
from megarl.data.encoder import PromptEncoder

NUM_TRAINING = 65536
NUM_HELD_OUT = 512

Problem = TypeVar("Problem")


@dataclass(frozen=True, slots=True)
class GeneratedTask(Generic[Problem]):
    """How one task draws, words, solves and (imperfectly) demonstrates a problem."""

    name: str
    draw: Callable[[random.Random], Problem]
    prompt: Callable[[Problem], str]
    answer: Callable[[Problem], str]
    demonstrate: Callable[[Problem, random.Random], str]


def is_held_out(prompt: str) -> bool:
    """About one prompt in five is kept for evaluation, decided by its text alone."""
    return zlib.crc32(prompt.encode()) % 5 == 0


class TrainingProblems(Generic[Problem]):
    """Problems with demonstrations, drawn from the whole space except its held-out part.

    Item ``i`` is a pure function of ``i``: nothing is stored, and all runs share one list.
    """

    num_skipped_rows = 0
    skip_report = ""
    content_hash: str | None = None

    def __init__(self, task: GeneratedTask[Problem], encoder: PromptEncoder) -> None:
        self._task = task
        self._encoder = encoder

    def __len__(self) -> int:
        return NUM_TRAINING

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < NUM_TRAINING:
            raise IndexError(index)
        task = self._task
        generator = random.Random(derive_seed("training problem", task.name, index))
        problem = task.draw(generator)
        while is_held_out(task.prompt(problem)):
            problem = task.draw(generator)
        text = task.prompt(problem)
        return Prompt(
            id=f"{task.name}:{index}",
            text=text,
            token_ids=self._encoder.encode(text),
            answer=task.answer(problem),
            demonstration=task.demonstrate(problem, generator),
            task=task.name,
        )


class HeldOutProblems(Generic[Problem]):
    """Distinct held-out problems, the same for all runs, without demonstrations: nobody can imitate them by mistake."""

    num_skipped_rows = 0
    skip_report = ""
    content_hash: str | None = None

    def __init__(self, task: GeneratedTask[Problem], encoder: PromptEncoder) -> None:
        generator = random.Random(derive_seed("held-out problems", task.name))
        chosen: dict[str, str] = {}
        while len(chosen) < NUM_HELD_OUT:
            problem = task.draw(generator)
            if is_held_out(task.prompt(problem)):
                chosen[task.prompt(problem)] = task.answer(problem)
        self._task_name = task.name
        self._encoder = encoder
        self._problems = list(chosen.items())

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        text, answer = self._problems[index]
        return Prompt(
            id=f"{self._task_name}_held_out:{index}",
            text=text,
            token_ids=self._encoder.encode(text),
            answer=answer,
            task=self._task_name,
        )

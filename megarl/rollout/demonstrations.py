"""Rollouts that nobody generated: demonstrations of the training data, for supervised learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.core.sample import Group, Prompt, Sample
from megarl.data.encoder import PromptEncoder
from megarl.metrics.meter import Meter
from megarl.rollout.prompt_stream import PromptStream, why_no_room
from megarl.rollout.serving import Enter
from megarl.rollout.statistics import report_lengths

READ = "data/read_demonstrations"


class DemonstrationRollouts:
    """``batch_size`` demonstrations per step, each a group of one."""

    def __init__(self, prompts: PromptStream, encoder: PromptEncoder, batch_size: int, enter: Enter) -> None:
        self._prompts = prompts
        self._encoder = encoder
        self._batch_size = batch_size
        self._enter = enter

    @property
    def epoch(self) -> int:
        """Complete passes over the demonstrations."""
        return self._prompts.epoch

    def collect(self, step: int, meter: Meter) -> Sequence[Group]:  # noqa: ARG002
        """The step's demonstrations on the driver, [] elsewhere."""
        with self._enter(READ, meter):
            prompts = self._prompts.draw(self._batch_size)
            groups = [Group(prompt, [show(prompt, self._encoder)]) for prompt in prompts]
        self._prompts.report(meter)
        longest = max((group.samples[0].num_response_tokens for group in groups), default=0)
        report_lengths(groups, longest, meter)
        return groups


def show(prompt: Prompt, encoder: PromptEncoder) -> Sample:
    """The prompt's demonstration as if the policy had said it."""
    assert prompt.demonstration is not None, "checked when the data was opened"
    response = encoder.encode_demonstration(prompt.demonstration)
    num_prompt = len(prompt.token_ids)
    return Sample(
        token_ids=np.concatenate([prompt.token_ids, response]),
        loss_mask=np.repeat(np.array([0, 1], dtype=np.int8), [num_prompt, len(response)]),
        rollout_logprobs=np.zeros(num_prompt + len(response), dtype=np.float32),
        finish="stop",
        response=prompt.demonstration,
    )


def why_no_room_to_show(prompt: Prompt, encoder: PromptEncoder, max_prompt_tokens: int, max_tokens: int) -> str | None:
    """A prompt that is too long, or too long with its demonstration, cannot be learned from; it is never cut."""
    problem = why_no_room(prompt, max_prompt_tokens)
    num_tokens = 0 if problem else len(show(prompt, encoder).token_ids)
    if num_tokens <= max_tokens:
        return problem
    return f"prompt {prompt.id!r} and its demonstration have {num_tokens} tokens; the model has {max_tokens} positions."

"""One question, one answer: prompts become requests, generations become samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from megarl.core.protocols import Generation, GenerationRequest, SamplingParams, Statistics
from megarl.core.sample import Group, Prompt, Sample
from megarl.core.seeding import derive_seed
from megarl.data.tokenizer import Tokenizer
from megarl.metrics.meter import Meter
from megarl.rollout.answering import Questions
from megarl.rollout.serving import Serving


class SingleTurn:
    """Prompts are answered once, all of a call at the same time."""

    def __init__(self, serving: Serving, tokenizer: Tokenizer) -> None:
        self._serving = serving
        self._tokenizer = tokenizer

    def answer(
        self, questions: Sequence[Questions], version: int, timer: str, meter: Meter, statistics: Statistics
    ) -> list[list[Group]]:
        """See `Answering`."""
        asked = [requests_for(one.prompts, one.name, one.num_samples, one.params, one.seed_parts) for one in questions]
        # of each request: what asked for it, and for which prompt
        owners = [(one, prompt) for one in questions for prompt in one.prompts for _ in range(one.num_samples)]
        requests = [request for those in asked for request in those]
        samples: dict[int, Sample] = {}

        def take(place: int, generation: Generation) -> None:
            request, (one, prompt) = requests[place], owners[place]
            samples[place] = sample_of(request.token_ids, request.seed, generation, self._tokenizer)
            one.on_sample(prompt, samples[place])

        generations = self._serving.generate(version, requests, timer, meter, statistics, take)
        for place, generation in enumerate(generations):
            if place not in samples:
                take(place, generation)
        drawn = iter(samples[place] for place in range(len(generations)))
        return [
            groups_of(one.prompts, list(islice(drawn, len(those)))) for one, those in zip(questions, asked, strict=True)
        ]

    def report(self, statistics: Statistics) -> None:
        """See `Answering`."""
        self._serving.report(statistics)


def requests_for(
    prompts: Sequence[Prompt], name: str, num_samples: int, params: SamplingParams, seed_parts: tuple[int | str, ...]
) -> list[GenerationRequest]:
    """``num_samples`` requests for every prompt, those of one prompt next to each other; their ids begin with ``name``.

    A sample's seed is made of ``seed_parts``, its prompt's place and its own place in the group, so that the same
    draws come out of any engine in any layout.
    """
    return [
        GenerationRequest(f"{name}/{row}/{column}", prompt.token_ids, derive_seed(*seed_parts, row, column), params)
        for row, prompt in enumerate(prompts)
        for column in range(num_samples)
    ]


def groups_of(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Group]:
    """The groups that samples make which were asked for by `requests_for` these prompts; [] for no samples."""
    size = len(samples) // len(prompts) if prompts else 0
    return [Group(prompt, list(samples[row * size : (row + 1) * size])) for row, prompt in enumerate(prompts)]


def sample_of(prompt_ids: np.ndarray, seed: int, generation: Generation, tokenizer: Tokenizer) -> Sample:
    """The sample that a prompt and its answer make."""
    num_prompt, num_new = len(prompt_ids), len(generation.token_ids)
    # The stop token is the policy's own choice and is learned, but it is no text.
    ended = generation.finish == "stop"
    text_ids = generation.token_ids[:-1] if ended else generation.token_ids
    return Sample(
        token_ids=np.concatenate([prompt_ids, generation.token_ids]),
        loss_mask=np.repeat(np.array([0, 1], dtype=np.int8), [num_prompt, num_new]),
        rollout_logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), generation.logprobs]),
        finish=generation.finish,
        response=tokenizer.decode(text_ids),
        version=generation.version,
        spans=generation.spans,
        engine=generation.engine,
        routed_experts=generation.routed_experts,
        seed=seed,
    )

"""One question, one answer: prompts become requests, generations become samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.core.protocols import Fleet, Generation, GenerationRequest, SamplingParams, Statistics
from megarl.core.sample import Group, Prompt, Sample
from megarl.core.seeding import derive_seed
from megarl.data.tokenizer import Tokenizer


def answer_all(
    prompts: Sequence[Prompt],
    num_samples: int,
    params: SamplingParams,
    seed_parts: tuple[int | str, ...],
    fleet: Fleet,
    tokenizer: Tokenizer,
    meter: Statistics,
) -> list[Group]:
    """``num_samples`` answers to every prompt, as groups on the driver, [] elsewhere. Collective.

    A sample's seed is made of ``seed_parts``, its prompt's place and its own place in the group, so that the same
    draws come out of any engine in any layout.
    """
    requests = [
        GenerationRequest(f"{row}/{column}", prompt.token_ids, derive_seed(*seed_parts, row, column), params)
        for row, prompt in enumerate(prompts)
        for column in range(num_samples)
    ]
    generations = fleet.generate(requests, meter)
    pairs = list(zip(requests, generations, strict=True))
    return [
        Group(prompt, [_sample(*pair, tokenizer) for pair in pairs[row * num_samples : (row + 1) * num_samples]])
        for row, prompt in enumerate(prompts)
    ]


def _sample(request: GenerationRequest, generation: Generation, tokenizer: Tokenizer) -> Sample:
    num_prompt, num_new = len(request.token_ids), len(generation.token_ids)
    # The stop token is the policy's own choice and is learned, but it is no text.
    ended = generation.finish == "stop"
    text_ids = generation.token_ids[:-1] if ended else generation.token_ids
    return Sample(
        token_ids=np.concatenate([request.token_ids, generation.token_ids]),
        loss_mask=np.repeat(np.array([0, 1], dtype=np.int8), [num_prompt, num_new]),
        rollout_logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), generation.logprobs]),
        finish=generation.finish,
        response=tokenizer.decode(text_ids),
        version=generation.version,
        seed=request.seed,
    )

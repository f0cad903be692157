"""Embedded engines, one inside each rank, behind one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megarl.core.protocols import Engine, Generation, GenerationRequest, SamplingParams, Statistics
from megarl.core.world import World


class EmbeddedFleet:
    """Deals the driver's requests to every rank's engine and collects what they generate."""

    def __init__(self, engine: Engine, world: World) -> None:
        self._engine = engine
        self._world = world

    def generate(self, requests: Sequence[GenerationRequest], meter: Statistics) -> list[Generation]:
        """The driver's requests, served by all engines; results in their order on the driver, [] elsewhere.
        Collective.
        """
        hands = deal(requests, self._world.size) if self._world.is_driver else []
        trees = [[_request_tree(requests[i]) for i in hand] for hand in hands]
        own = [_request_from(tree) for tree in self._world.scatter(trees if self._world.is_driver else None)]
        start = time.monotonic()
        generations = self._engine.generate(own)
        seconds = time.monotonic() - start
        meter.mean("timing_s/generate_sequences", seconds, 1)
        meter.min("timing_s/generation_timing/min", seconds)
        meter.max("timing_s/generation_timing/max", seconds)
        gathered = self._world.gather([_generation_tree(generation) for generation in generations])
        if gathered is None:
            return []
        results: dict[int, Generation] = {}
        for hand, trees_of_rank in zip(hands, gathered, strict=True):
            results.update((i, Generation(**tree)) for i, tree in zip(hand, trees_of_rank, strict=True))
        return [results[i] for i in range(len(requests))]


def deal(requests: Sequence[GenerationRequest], num_engines: int) -> list[list[int]]:
    """Which requests each engine serves.

    Requests that follow each other with one prompt (a group) stay together, so that the prompt is prefilled once, up to
    an engine's fair share; groups go to the engine with the fewest requests.
    """
    fair_share = -(-len(requests) // num_engines)
    groups: list[list[int]] = []
    for i, request in enumerate(requests):
        same_prompt = i and request.token_ids.tobytes() == requests[i - 1].token_ids.tobytes()
        if same_prompt and len(groups[-1]) < fair_share:
            groups[-1].append(i)
        else:
            groups.append([i])
    hands: list[list[int]] = [[] for _ in range(num_engines)]
    for group in groups:
        min(hands, key=len).extend(group)
    return hands


def _request_tree(request: GenerationRequest) -> dict[str, Any]:
    return {**_fields(request), "params": asdict(request.params)}


def _request_from(tree: dict[str, Any]) -> GenerationRequest:
    params = tree.pop("params")
    stop = tuple(params.pop("stop_token_ids"))
    return GenerationRequest(**tree, params=SamplingParams(**params, stop_token_ids=stop))


def _fields(request: GenerationRequest) -> dict[str, Any]:
    return {"id": request.id, "token_ids": request.token_ids, "seed": request.seed}


def _generation_tree(generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.id,
        "token_ids": generation.token_ids,
        "logprobs": generation.logprobs,
        "finish": generation.finish,
        "version": generation.version,
    }

"""The generators of libraries go on where they were, and looking at them changes nothing."""

from __future__ import annotations

import random

import numpy as np
import torch

from megarl.run.rng import restore_rng_state, rng_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    # an odd number of normal draws: the second half of a pair is part of the state
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_every_generator_goes_on_where_it_was() -> None:
    draw()
    state = rng_state(CPU)
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore_rng_state(state, CPU)
    assert [draw(), draw()] == expected


def test_looking_draws_nothing() -> None:
    state = rng_state(CPU)
    expected = draw()
    restore_rng_state(state, CPU)
    for _ in range(3):
        rng_state(CPU)
    assert draw() == expected

"""The reward `model` on real ranks: what the loop gives a sample is what transformers gives the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.sample import Group, Prompt, Sample
from tests.distributed.tiny_models import tiny_model
from tests.e2e.runs import QUICKSTART

VOCAB_SIZE, PAD = 64, 0
SIZES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 of a dp2 run": {"tp_size": 2},
    "pp2 of a dp2 run": {"pp_size": 2},
    "dp2": {},
}
# The groups of one step. 0 is padding: also where the policy ends a text with it, or writes nothing else.
GROUPS = [[40, 7, 1], [23], [5, 90], [2]]


def sequences() -> list[list[np.ndarray]]:
    generator = np.random.default_rng(7)
    groups = [[generator.integers(1, VOCAB_SIZE, length) for length in lengths] for lengths in GROUPS]
    groups[0][0][-3:] = PAD
    groups[3][0][:] = PAD
    return groups


def score_job(world: Any, directory: str, sizes: dict[str, Any], max_tokens: int) -> Any:
    """Two steps' scores; the second has no samples."""
    from megarl.config.load import load_config
    from megarl.run.model_scorer import ModelScorer
    from megarl.run.roles import build_reward_model, forward_plan

    parallel = "{" + ", ".join(f"{key}: {size}" for key, size in sizes.items()) + "}"
    config = load_config(
        QUICKSTART,
        [
            "reward=model",
            f"run.num_ranks={world.size}",
            f"reward_model={{path: {directory}, parallel: {parallel}, max_tokens_per_microbatch: {max_tokens}}}",
        ],
    )
    model = build_reward_model(config, world)
    assert model is not None
    plan = forward_plan(config, "reward_model", config.reward_model_parallel, model.model.shape)
    groups = [Group(Prompt(str(i), "", ids[0]), [_sample(one) for one in ids]) for i, ids in enumerate(sequences())]
    scorer = ModelScorer(model, plan)
    part = model.parts["reward_model.weights"]
    part.offload()
    assert part.num_bytes == 0
    part.onload()
    return scorer.score(groups if world.is_driver else []), scorer.score([])


def _sample(ids: np.ndarray) -> Sample:
    return Sample(ids, np.zeros(len(ids), np.int8), np.zeros(len(ids), np.float32), "stop")


@pytest.mark.parametrize("layout", SIZES)
def test_scores_are_those_of_transformers(layout: str, gang: Any, tmp_path: Path) -> None:
    model = tiny_model(
        "llama", directory=tmp_path, head="ForSequenceClassification", num_labels=1, pad_token_id=PAD,
        vocab_size=VOCAB_SIZE, max_position_embeddings=128,
    )  # fmt: skip
    with torch.no_grad():
        expected = [[float(model(torch.from_numpy(ids)[None]).logits) for ids in group] for group in sequences()]
    size = 1 if layout == "one rank" else 2
    # a budget below the longest sequence: it travels alone
    results = gang(size).run(score_job, directory=str(tmp_path), sizes=SIZES[layout], max_tokens=50)
    scores, none = results[0]
    assert [len(group) for group in scores] == [len(group) for group in GROUPS]
    flat, wanted = (np.array([score for group in groups for score in group]) for groups in (scores, expected))
    # fp32 with sums in another order
    np.testing.assert_allclose(flat, wanted, rtol=1e-5, atol=1e-6)
    assert np.ptp(wanted) > 0.1, "samples differ"
    assert none == []
    assert all(result == ([], []) for result in results[1:])

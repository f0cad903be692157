"""Gradients of the packed Megatron model are those of transformers for the same loss of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.tiny_models import tiny_model

TEMPERATURE = 0.8
LENGTHS = (7, 30, 2, 18, 18)


def gradients_job(
    world: Any, directory: str, sequences: list[np.ndarray], weights: list[np.ndarray]
) -> dict[str, np.ndarray]:
    """Main gradients by Hugging Face name, of two micro-batches in one optimizer step."""
    from megarl.models.optim import OptimizerSettings
    from megarl.models.packed import PackedMicroBatch
    from megarl.models.parameter_table import whole_table
    from megarl.models.pipeline import forward_backward
    from tests.distributed.batches import microbatch
    from tests.distributed.builders import language_model, trainable

    model = language_model(world, directory)
    trained = trainable(model, OptimizerSettings(lr=1e-3, num_updates=10))
    microbatches = []
    for chosen in (slice(0, 3), slice(3, None)):
        micro = microbatch([torch.from_numpy(sequence) for sequence in sequences[chosen]])
        micro.loss_weight = torch.from_numpy(np.concatenate(weights[chosen]))
        microbatches.append(micro)

    def loss(hidden: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
        logprobs, entropy = model.token_logprobs(hidden, packed, TEMPERATURE)
        return ((0.3 * entropy - logprobs) * packed.micro.loss_weight).sum()

    trained.zero_grad()
    forward_backward(trained.chunks, microbatches, loss, model.layout)
    parameters = dict(model.chunks[0].named_parameters())
    gradients = {}
    for entry in whole_table(model.shape):
        whole = entry.cut.whole([parameters[entry.name].main_grad])
        gradients.update({name: one.numpy().copy() for name, one in zip(entry.hf_names, whole, strict=True)})
    return gradients


def expected_gradients(model: Any, sequences: list[np.ndarray], weights: list[np.ndarray]) -> dict[str, np.ndarray]:
    for sequence, weight in zip(sequences, weights, strict=True):
        ids = torch.from_numpy(sequence)
        logits = model(ids[None]).logits[0, :-1] / TEMPERATURE
        distribution = torch.distributions.Categorical(logits=logits)
        token_loss = 0.3 * distribution.entropy() - distribution.log_prob(ids[1:])
        (token_loss * torch.from_numpy(weight)[1:]).sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen3", True), ("qwen2", True)])
def test_gradients_equal_transformers(family: str, tied: bool, gang: Any, tmp_path: Path) -> None:
    model = tiny_model(family, tied=tied, directory=tmp_path)
    generator = np.random.default_rng(2)
    sequences = [generator.integers(0, model.config.vocab_size, length) for length in LENGTHS]
    weights = [generator.standard_normal(length).astype(np.float32) for length in LENGTHS]
    for weight in weights:
        weight[0] = 0  # nobody predicts the first token
        weight[2::3] = 0
    (gradients,) = gang(1).run(gradients_job, directory=str(tmp_path), sequences=sequences, weights=weights)
    expected = expected_gradients(model, sequences, weights)
    assert gradients.keys() == expected.keys()
    for name, theirs in expected.items():
        largest = np.abs(theirs).max()
        assert largest > 1e-3, f"{name} has no gradient to speak of"
        # float32 through four layers with sums in another order: up to 4e-6 of the tensor's largest entry is seen
        assert np.abs(gradients[name] - theirs).max() < 2e-5 * largest, name

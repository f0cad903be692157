"""A decoder on Megatron: its weights by Hugging Face name, and what it says about tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megarl.config.model_shape import ModelShape
from megarl.core.batch import MicroBatch
from megarl.core.world import World
from megarl.models.build import build_gpt, padded_vocab_size, valid_vocab_columns
from megarl.models.hf_weights import (
    WeightSource,
    export_weights,
    import_weights,
    random_weights,
    safetensors_weights,
)
from megarl.models.parameter_table import parameter_table, value_table
from megarl.ops.logprobs import align_to_tokens, next_tokens, token_logprobs


def initial_weights(shape: ModelShape, path: Path | None, seed: int) -> WeightSource:
    """A Hugging Face directory's tensors, or random ones."""
    return safetensors_weights(path) if path is not None else random_weights(seed, shape.initializer_range)


class LanguageModel:
    """A decoder with a vocabulary head: log-probs and entropies of packed tokens."""

    def __init__(self, shape: ModelShape, world: World, source: WeightSource) -> None:
        self._world = world
        self._shape = shape
        self.module: GPTModel = build_gpt(shape, world)
        self._tables = [
            parameter_table(shape, world.pp.size, stage, fused_norms=world.device.type == "cuda")
            for stage in range(world.pp.size)
        ]
        import_weights(self.module, self._tables[world.pp.rank], source, world)

    def token_logprobs(
        self, output: torch.Tensor, micro: MicroBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] log-probs and entropies, aligned to the tokens, of this rank's ``[T, columns]`` logits."""
        width = padded_vocab_size(self._shape, self._world.tp.size) // self._world.tp.size
        logits = output[:, : valid_vocab_columns(self._shape, self._world)]
        logprobs, entropy = token_logprobs(
            logits, next_tokens(micro.token_ids), self._world.tp.group, self._world.tp.rank * width, temperature
        )
        return align_to_tokens(logprobs), align_to_tokens(entropy)

    def export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of (Hugging Face name, whole tensor). Collective over the replica's ranks."""
        return export_weights(self.module, self._tables, self._world)


class ValueHead(torch.nn.Module):
    """One number per token, in the place of Megatron's vocabulary layer and with its calling convention.

    Tensor-parallel ranks hold the same hidden states and the same weights, so no communication is needed.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))

    def forward(
        self,
        hidden: torch.Tensor,
        weight: None = None,  # noqa: ARG002
        runtime_gather_output: bool | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, hidden] -> ([T, 1, 1], no bias), in fp32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None


def build_value_module(shape: ModelShape, world: World, source: WeightSource) -> GPTModel:
    """A decoder whose last stage ends in a `ValueHead`."""
    module = build_gpt(shape, world)
    module.share_embeddings_and_output_weights = False
    if world.is_last_stage:
        dtype = next(module.parameters()).dtype
        module.output_layer = ValueHead(shape.hidden_size, dtype, world.device)
    table = value_table(shape, world.pp.size, world.pp.rank, fused_norms=world.device.type == "cuda")
    import_weights(module, table, source, world)
    return module


@torch.no_grad()
def copy_weights(source: GPTModel, target: GPTModel) -> None:
    """Copy every parameter that both models have (a value head has no twin and stays). The layouts must be equal."""
    theirs = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        twin = theirs.get(name)
        if twin is not None and twin.shape == parameter.shape:
            parameter.copy_(twin)

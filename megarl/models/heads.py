"""What stands in the place of Megatron's output layer: a vocabulary head that never makes all logits, a value head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class VocabularyHead(torch.nn.Module):
    """Hands the last hidden states on, ready to be multiplied by this rank's rows of the output layer.

    The product is left to `ops.logprobs.hidden_logprobs`, which takes it a few tokens at a time. The weight stays
    here, under the name and with the marks that Megatron gave it.
    """

    def __init__(self, module: GPTModel) -> None:
        super().__init__()
        # None where the embedding of the same stage serves as output layer
        self.register_parameter("weight", module.output_layer.weight)
        self._sequence_parallel: bool = module.config.sequence_parallel
        self._group: dist.ProcessGroup = module.pg_collection.tp

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,  # noqa: ARG002  (Megatron's calling convention)
        runtime_gather_output: bool | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, None]:
        """The hidden states of all tokens. Their gradient, partial on every rank, is summed over the ranks."""
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self._group), None
        return copy_to_tensor_model_parallel_region(hidden, group=self._group), None


class ValueHead(torch.nn.Module):
    """One number per token, in the place of Megatron's vocabulary layer and with its calling convention.

    Tensor-parallel ranks hold the same hidden states and the same weights, so they compute the same values.
    """

    def __init__(self, module: GPTModel, *, bias: bool) -> None:
        super().__init__()
        config = module.config
        where = {"dtype": config.params_dtype, "device": next(module.parameters()).device}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **where))
        self.bias = torch.nn.Parameter(torch.zeros(1, **where)) if bias else None
        self._sequence_parallel: bool = config.sequence_parallel
        self._group: dist.ProcessGroup = module.pg_collection.tp

    def forward(
        self,
        hidden: torch.Tensor,
        weight: None = None,  # noqa: ARG002
        runtime_gather_output: bool | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, hidden] -> ([T, 1, 1], nothing left to add), in fp32."""
        if self._sequence_parallel:
            # every rank goes on with all tokens and the same loss, so its own tokens' gradient is already whole
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._group)
        bias = self.bias.float() if self.bias is not None else None
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), bias), None

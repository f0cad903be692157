"""How much arithmetic a model does, exactly: the numerator of model FLOPs utilisation.

Per layer and sequence of s tokens, forward: ``2 s (h d (n_q + 2 n_kv) + n_q d h + ffn) + 2 n_q d s²``, with the causal
half of attention's s² counted, and ``ffn`` the three matrices of an MLP or those of the experts that a token visits,
with router and shared expert. The output projection counts once more, ``2 s h V`` (for a critic V is 1); the input
embedding is a look-up and does not count. Training is three times the forward pass: recomputation is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.families import VALUE_HEADS
from megarl.config.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Operations of one forward pass: so many for every token, and so many for every token squared."""

    per_token: float
    per_squared_token: float

    @classmethod
    def of(cls, shape: ModelShape) -> Arithmetic:
        """The arithmetic of a model."""
        width = shape.num_heads * shape.head_dim
        return cls(2.0 * matmul_weights(shape), 2.0 * shape.num_layers * width)

    def forward(self, num_tokens: float, num_squared_tokens: float) -> float:
        """Operations over sequences with so many tokens, and so many squared tokens, in all."""
        return self.per_token * num_tokens + self.per_squared_token * num_squared_tokens


def matmul_weights(shape: ModelShape) -> int:
    """Weights that a token is multiplied with on its way through the model."""
    hidden, width, kv_width = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = hidden * (2 * width + 2 * kv_width)
    dense = 3 * hidden * shape.intermediate_size
    sparse = 0
    if shape.experts is not None:
        experts = shape.experts
        visited = experts.num_experts_per_token * experts.intermediate_size + experts.shared_intermediate_size
        gate = hidden if experts.shared_intermediate_size else 0
        sparse = 3 * hidden * visited + hidden * experts.num_experts + gate
    num_dense = shape.num_layers - shape.num_sparse_layers
    num_outputs = 1 if shape.architecture.endswith(VALUE_HEADS) else shape.vocab_size
    return shape.num_layers * attention + num_dense * dense + shape.num_sparse_layers * sparse + hidden * num_outputs

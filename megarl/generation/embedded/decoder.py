"""The arithmetic of a decoder: Llama, Mistral, Qwen2, Qwen3 and the sparse Qwens, after the rules of `rounding`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from megarl.config.model_shape import ModelShape
from megarl.generation.embedded.feed_forward import add_experts_, add_mlp
from megarl.generation.embedded.kv_pool import KvPool
from megarl.generation.embedded.rounding import CONTEXT_STEP, MIN_ROWS
from megarl.generation.embedded.weights import DecoderWeights, LayerWeights, MlpWeights
from megarl.ops.rope import rope_frequencies

_PREFILL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Prompts of one length, packed one after the other: tokens ``start`` to ``stop``, pool rows ``rows``."""

    start: int
    stop: int
    length: int
    rows: torch.Tensor


class Decoder:
    """Runs the weights over the rows of the pool."""

    def __init__(self, shape: ModelShape, weights: DecoderWeights, pool: KvPool) -> None:
        self._shape = shape
        self._weights = weights
        self._pool = pool
        self._device = weights.embedding.device
        self._num_rotated = shape.num_heads + shape.num_kv_heads
        self._rotations = _rotations(shape, pool.num_positions).to(self._device)
        self._positions = torch.arange(pool.num_positions, device=self._device)
        # Offsets, in heads of one position, of every (row, kv head) in one layer of the pool.
        starts = torch.arange(pool.num_rows * shape.num_kv_heads, device=self._device) * pool.num_positions
        self._head_starts = starts.view(pool.num_rows, shape.num_kv_heads)
        self.num_prefilled_tokens = 0

    def prefill(self, prompts: Sequence[NDArray[np.int64]], rows: Sequence[int]) -> torch.Tensor:
        """Write each prompt's keys and values into its row; give the logits after each prompt, in their order."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        self._pool.cover(len(prompts[order[-1]]))
        logits: list[torch.Tensor] = []
        for batch in _batches(order, [len(prompts[index]) for index in order]):
            logits.append(self._prefill_packed([prompts[i] for i in batch], [rows[i] for i in batch]))
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(logits)[back.to(self._device)]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, max_length: int) -> torch.Tensor:
        """Append one token to each of the pool's first rows; give the logits after it.

        ``max_length`` is the largest length after this token. Rows are as many as tokens, at least `MIN_ROWS`.
        """
        num_rows, shape, pool = len(tokens), self._shape, self._pool
        context = min(-(-max_length // CONTEXT_STEP) * CONTEXT_STEP, pool.num_positions)
        pool.cover(context)
        rotations = self._rotations[positions][:, None]
        places = (self._head_starts[:num_rows] + positions[:, None]).flatten()
        hidden = self._weights.embedding[tokens]
        bias = torch.zeros(num_rows, context, dtype=hidden.dtype, device=self._device)
        bias.masked_fill_(self._positions[:context] > positions[:, None], -math.inf)
        bias = bias[:, None, None]
        for index, layer in enumerate(self._weights.layers):
            heads = self._heads(hidden, layer, rotations)
            queries, keys, values = self._split(heads)
            stored_keys, stored_values = pool.keys[index], pool.values[index]
            stored_keys.view(-1, shape.head_dim).index_copy_(0, places, keys.reshape(-1, shape.head_dim))
            stored_values.view(-1, shape.head_dim).index_copy_(0, places, values.reshape(-1, shape.head_dim))
            # There is one query position, so the query heads of one kv head stand in its place: nothing is repeated.
            mixed = functional.scaled_dot_product_attention(
                queries.reshape(num_rows, shape.num_kv_heads, -1, shape.head_dim),
                stored_keys[:num_rows, :, :context],
                stored_values[:num_rows, :, :context],
                attn_mask=bias,
            )
            hidden = self._rest_of_layer(hidden, mixed.reshape(num_rows, -1), layer)
        return self._logits(hidden)

    def _prefill_packed(self, prompts: Sequence[NDArray[np.int64]], rows: Sequence[int]) -> torch.Tensor:
        """Prompts in order of length, packed. The last layer goes on with the last token of each prompt alone."""
        lengths = [len(prompt) for prompt in prompts]
        self.num_prefilled_tokens += sum(lengths)
        packed = np.concatenate([*prompts, np.zeros(max(MIN_ROWS - sum(lengths), 0), dtype=np.int64)])
        last = torch.from_numpy(np.cumsum([*lengths, *[0] * (MIN_ROWS - len(lengths))]) - 1).to(self._device)
        positions = np.concatenate([np.arange(length) for length in [*lengths, len(packed) - sum(lengths)]])
        rotations = self._rotations[torch.from_numpy(positions).to(self._device)][:, None]
        stretches = self._stretches(lengths, rows)
        hidden = self._weights.embedding[torch.from_numpy(packed).to(self._device)]
        for index, layer in enumerate(self._weights.layers):
            heads = self._heads(hidden, layer, rotations)
            mixed = hidden.new_zeros(len(packed), self._shape.num_heads * self._shape.head_dim)
            for stretch in stretches:
                mixed[stretch.start : stretch.stop] = self._attend_stretch(heads, stretch, index)
            if index == len(self._weights.layers) - 1:
                hidden, mixed = hidden[last], mixed[last]
            hidden = self._rest_of_layer(hidden, mixed, layer)
        return self._logits(hidden)[: len(prompts)]

    def _stretches(self, lengths: Sequence[int], rows: Sequence[int]) -> list[_Stretch]:
        stretches, start, first = [], 0, 0
        for length, same in itertools.groupby(lengths):
            count = len(list(same))
            chosen = torch.tensor(rows[first : first + count], device=self._device)
            stretches.append(_Stretch(start, start + count * length, length, chosen))
            start, first = start + count * length, first + count
        return stretches

    def _attend_stretch(self, heads: torch.Tensor, stretch: _Stretch, layer: int) -> torch.Tensor:
        """Causal attention inside each prompt of the stretch; its keys and values go to the pool."""
        by_prompt = heads[stretch.start : stretch.stop].view(-1, stretch.length, *heads.shape[1:])
        queries, keys, values = (part.transpose(1, 2) for part in self._split(by_prompt))
        self._pool.keys[layer][stretch.rows, :, : stretch.length] = keys
        self._pool.values[layer][stretch.rows, :, : stretch.length] = values
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(stretch.stop - stretch.start, -1)

    def _heads(self, hidden: torch.Tensor, layer: LayerWeights, rotations: torch.Tensor) -> torch.Tensor:
        """Query, key and value heads ``[token, head, head_dim]``; queries and keys are rotated to their positions."""
        shape = self._shape
        normed = functional.rms_norm(hidden, (shape.hidden_size,), layer.input_norm, shape.rms_norm_eps)
        heads = layer.qkv.times(normed, layer.qkv_bias).view(len(hidden), -1, shape.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys, _ = self._split(heads)
            queries.copy_(functional.rms_norm(queries, (shape.head_dim,), layer.query_norm, shape.rms_norm_eps))
            keys.copy_(functional.rms_norm(keys, (shape.head_dim,), layer.key_norm, shape.rms_norm_eps))
        _rotate_(heads[:, : self._num_rotated], rotations)
        return heads

    def _split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the query, key and value heads; the head axis is the last but one."""
        num_heads, num_rotated = self._shape.num_heads, self._num_rotated
        return heads[..., :num_heads, :], heads[..., num_heads:num_rotated, :], heads[..., num_rotated:, :]

    def _rest_of_layer(self, hidden: torch.Tensor, mixed: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """What follows attention; its residual addition happens inside the matrix product."""
        shape = self._shape
        hidden = layer.attention_out.added_to(hidden, mixed)
        normed = functional.rms_norm(hidden, (shape.hidden_size,), layer.post_norm, shape.rms_norm_eps)
        if isinstance(layer.mlp, MlpWeights):
            return add_mlp(hidden, normed, layer.mlp)
        assert shape.experts is not None  # only a shape with experts has sparse layers
        return add_experts_(hidden, normed, layer.mlp, shape.experts)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        shape, weights = self._shape, self._weights
        normed = functional.rms_norm(hidden, (shape.hidden_size,), weights.final_norm, shape.rms_norm_eps)
        return weights.head.times(normed).float()


def _batches(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Cut the order into runs of at most `_PREFILL_TOKENS` tokens (or one prompt), to bound the activations."""
    batches: list[list[int]] = []
    num_tokens = 0
    for index, length in zip(order, lengths, strict=True):
        if not batches or num_tokens + length > _PREFILL_TOKENS:
            batches.append([])
            num_tokens = 0
        batches[-1].append(index)
        num_tokens += length
    return batches


def _rotations(shape: ModelShape, num_positions: int) -> torch.Tensor:
    """One complex number per (position, pair), from fp32 angles as in transformers; its modulus scales attention."""
    frequencies, modulus = rope_frequencies(shape)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos() * modulus, angles.sin() * modulus)


def _rotate_(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotate neighbouring pairs in place; in fp32 whatever the heads are in."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotations))

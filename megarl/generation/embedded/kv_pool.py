"""The static pool of keys and values, one row per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.config.model_shape import ModelShape

_PAGE = 256  # positions that are cleared at a time


class KvPool:
    """Keys and values ``[layer, row, kv head, position, head_dim]``, allocated once.

    Attention reads rows up to the longest one's length and weighs positions beyond a row's own length with zero. Zero
    times whatever memory held before could be NaN, so positions are cleared before they are first read (`cover`): until
    then their pages are not touched and cost no physical memory.
    """

    def __init__(self, shape: ModelShape, num_rows: int, num_positions: int, dtype: torch.dtype, device: torch.device):
        size = (2, shape.num_layers, num_rows, shape.num_kv_heads, num_positions, shape.head_dim)
        self._data = torch.empty(size, dtype=dtype, device=device)
        self._num_bytes = self._data.untyped_storage().nbytes()
        self._num_covered = 0
        self.num_rows = num_rows
        self.num_positions = num_positions
        self.keys, self.values = self._data[0], self._data[1]

    @property
    def num_bytes(self) -> int:
        """Bytes held now; 0 while released."""
        return self._data.untyped_storage().nbytes()

    def cover(self, num_positions: int) -> None:
        """From here on, positions below ``num_positions`` hold numbers in every row."""
        if num_positions > self._num_covered:
            covered = min(-(-num_positions // _PAGE) * _PAGE, self.num_positions)
            self._data[..., self._num_covered : covered, :].zero_()
            self._num_covered = covered

    def clear(self, start: int, stop: int) -> None:
        """Drop the contents of these rows, as after a forward that wrote numbers which are not finite."""
        self._data[:, :, start:stop, :, : self._num_covered].zero_()

    def copy_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give the targets the first ``length`` positions of the source."""
        for target in targets:
            self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def release(self) -> None:
        """Give the memory back; the contents are lost."""
        self._data.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Take the memory again, without contents."""
        self._data.untyped_storage().resize_(self._num_bytes)
        self._num_covered = 0

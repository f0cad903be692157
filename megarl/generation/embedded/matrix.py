"""A weight matrix in the order in which the processor reads it.

While an engine serves, the same matrices are multiplied with few rows at each token, and most of that time goes into
bringing their numbers to the processor. oneDNN needs half the time if they already lie in the order of its kernel, and
a row's result does not depend on how many rows there are (two at least). Packing only moves numbers: what is read back
has the same bits.
"""

from __future__ import annotations

import platform

import torch
from torch.nn import functional


class Matrix:
    """Weights ``[output, input]``: plain while they are written, packed while they serve.

    They are held once, in one of the two forms (``is_shared``: somebody else reads the plain form too, so it stays).
    What only oneDNN on x86 in fp32 gains from stays plain elsewhere.
    """

    def __init__(self, plain: torch.Tensor, is_shared: bool = False) -> None:
        self._plain = plain
        self._is_shared = is_shared
        self._packed: torch.Tensor | None = None
        self._num_bytes = plain.nbytes
        self._can_pack = (
            plain.device.type == "cpu"
            and plain.dtype == torch.float32
            and platform.machine() in ("x86_64", "AMD64")
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes held now, without what is shared."""
        plain = 0 if self._is_shared else self._plain.untyped_storage().nbytes()
        return plain + (self._num_bytes if self._packed is not None else 0)

    def open(self) -> None:
        """Take memory for the plain form, to be written as a whole; the values are undefined."""
        self._packed = None
        if not self._plain.untyped_storage().nbytes() and not self._is_shared:
            self._plain.untyped_storage().resize_(self._num_bytes)

    def seal(self) -> None:
        """Get ready to serve what was written."""
        if self._can_pack:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain)
            if not self._is_shared:
                self._plain.untyped_storage().resize_(0)

    def release(self) -> None:
        """Give the memory back; the values are lost."""
        self._packed = None
        if not self._is_shared:
            self._plain.untyped_storage().resize_(0)

    def values(self) -> torch.Tensor:
        """The numbers that are served, in their plain order: the plain form itself, or a copy of the packed one."""
        return self._plain if self._packed is None else self._packed.to_dense()

    def times(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Each row multiplied with the weights, plus the bias."""
        if self._packed is None:
            return functional.linear(rows, self._plain, bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return product

    def added_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The residual plus each row multiplied with the weights; one pass over both."""
        if self._packed is None:
            return torch.addmm(residual, rows, self._plain.t())
        total: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._packed, None, "add")
        return total

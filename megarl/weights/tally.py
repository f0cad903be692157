"""What a courier sent in one push, as far as it must be compared with what arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.core.bucket import NamedTensor, num_bytes
from megarl.core.checksum import combine, tensor_checksum
from megarl.core.seeding import derive_seed

# parameters to read back, and rows of each; SGLang turns the whole parameter into a list first, so not the largest
_NUM_SAMPLES, _NUM_ROWS, _MAX_ELEMENTS = 4, 4, 2**22
# SGLang cuts these out of a fused matrix with arithmetic that does not hold for every model
_NOT_READ_BACK = (".k_proj.", ".v_proj.", "embed_tokens", "lm_head")


class Tally:
    """The checksum over all tensors, and the first rows of a few: other ones for every version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.num_bytes = 0
        self._checksums: list[int] = []
        self._samples: dict[str, torch.Tensor] = {}

    def add(self, bucket: Sequence[NamedTensor]) -> None:
        """Take note of a bucket."""
        self.num_bytes += num_bytes(bucket)
        self._checksums.extend(tensor_checksum(name, tensor) for name, tensor in bucket)
        for name, tensor in bucket:
            if tensor.numel() <= _MAX_ELEMENTS and not any(part in name for part in _NOT_READ_BACK):
                self._samples[name] = tensor.detach()[:_NUM_ROWS].float().cpu().clone()
        chosen = sorted(self._samples, key=lambda name: derive_seed(self.version, name))[:_NUM_SAMPLES]
        self._samples = {name: self._samples[name] for name in chosen}

    @property
    def checksum(self) -> int:
        """Over everything that was sent."""
        return combine(self._checksums)

    @property
    def samples(self) -> dict[str, torch.Tensor]:
        """First rows by parameter."""
        return self._samples

    @property
    def num_rows(self) -> int:
        """Rows of each sample, at most."""
        return _NUM_ROWS

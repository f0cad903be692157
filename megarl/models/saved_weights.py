"""The policy's weights in a checkpoint, for a model of any layout that is not trained."""

from __future__ import annotations

from functools import lru_cache

import torch

from megarl.config.model_shape import ModelShape
from megarl.models.cuts import Part, Shape
from megarl.models.hf_weights import WeightSource
from megarl.models.parameter_table import whole_table
from megarl.models.saved_tensors import Read, saved_tensors


def saved_weights(read: Read, shape: ModelShape) -> WeightSource:
    """The weights that a checkpoint holds of a policy of this shape, whatever its layout was; one parameter at a time
    is in memory.
    """
    parameter_of = {name: parameter for parameter in whole_table(shape) for name in parameter.hf_names}

    @lru_cache(maxsize=1)
    def tensors_of(first_name: str) -> list[torch.Tensor]:
        return saved_tensors(read, parameter_of[first_name])

    def source(name: str, _: Shape, part: Part) -> torch.Tensor:
        names = parameter_of[name].hf_names
        return part.of(tensors_of(names[0])[names.index(name)])

    return source

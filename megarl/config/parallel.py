"""How a model is cut over ranks: the section that every model of a run may have for itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section, setting

MOST_RANKS = 4096
_MOST_LAYERS = 10_000


def _as_layer_counts(value: Any) -> Any:
    """A YAML list as a tuple, because a section must be hashable."""
    if value is None:
        return None
    numbers = list(value) if isinstance(value, (list, tuple)) else []
    if not numbers or any(type(number) is not int or not 1 <= number <= _MOST_LAYERS for number in numbers):
        raise PydanticCustomError("layer_counts_type", "not a list of layer counts")
    return tuple(numbers)


LayerCounts = Annotated[tuple[int, ...] | None, BeforeValidator(_as_layer_counts)]


class ParallelSettings(Section):
    """How one copy of the model is cut. Ranks that are left over become data-parallel replicas."""

    tp_size: int = setting(
        1,
        "Tensor-parallel size: ranks that share every layer.",
        ge=1,
        le=MOST_RANKS,
        elsewhere="tensor_model_parallel_size tensor_parallel_size tp",
    )
    sequence_parallel: bool = setting(
        False,
        "Tensor-parallel ranks also share the activations between layers. A mixture of experts needs it.",
        elsewhere="use_sequence_parallel sp",
    )
    pp_size: int = setting(
        1,
        "Pipeline-parallel size: stages that the layers are dealt to.",
        ge=1,
        le=MOST_RANKS,
        elsewhere="pipeline_model_parallel_size pipeline_parallel_size pp",
    )
    vpp_size: int = setting(
        1,
        "Stages that every pipeline rank holds, run interleaved; 1: plain one-forward-one-backward.",
        ge=1,
        le=MOST_RANKS,
        elsewhere="virtual_pipeline_model_parallel_size virtual_pipeline_size vpp",
    )
    stage_layers: LayerCounts = setting(
        None,
        "Layers of every stage in pipeline order, pp_size x vpp_size of them; null: equal stages.",
        rule=f"a list of whole numbers >= 1 and <= {_MOST_LAYERS}, or null",
        elsewhere="pipeline_model_parallel_layout decoder_first_pipeline_num_layers num_layers_in_first_pipeline_stage "
        "decoder_last_pipeline_num_layers num_layers_in_last_pipeline_stage",
    )
    cp_size: int = setting(
        1,
        "Context-parallel size: ranks that share every sequence.",
        ge=1,
        le=MOST_RANKS,
        elsewhere="context_parallel_size cp ulysses_sequence_parallel_size",
    )
    ep_size: int = setting(
        1,
        "Expert-parallel size: ranks that the experts are dealt to.",
        ge=1,
        le=MOST_RANKS,
        elsewhere="expert_model_parallel_size expert_parallel_size ep",
    )
    etp_size: int | None = setting(
        None,
        "Tensor-parallel size inside experts; null: tp_size.",
        ge=1,
        le=MOST_RANKS,
        elsewhere="expert_tensor_parallel_size etp",
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def expert_tp_size(self) -> int:
        """Ranks that share every expert."""
        return self.tp_size if self.etp_size is None else self.etp_size

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, those that share a rank counted one by one."""
        return self.pp_size * self.vpp_size

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...]:
        """Layers of every stage in pipeline order. Stage ``s`` is on pipeline rank ``s % pp_size``."""
        return self.stage_layers or (num_layers // self.num_stages,) * self.num_stages

"""Models in the layout of a test's world; imported by jobs only, because it imports Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.model_shape import ModelShape, read_hf_config, shape_from_hf
from megarl.config.parallel import ParallelSettings
from megarl.core.world import World
from megarl.models.build import ModelOptions
from megarl.models.decoder import LanguageModel
from megarl.models.hf_weights import WeightSource, safetensors_weights
from megarl.models.layout import Layout
from megarl.models.optim import OptimizerSettings, Trainable, TrainingOptions
from megarl.models.setup import lay_out


def layout_of(world: World) -> Layout:
    """The layout that the gang started, if only its tp_size and pp_size were given."""
    return lay_out(world, ParallelSettings(tp_size=world.tp.size, pp_size=world.pp.size))


def shape_in(directory: str) -> ModelShape:
    return shape_from_hf(read_hf_config(Path(directory)), directory)


def language_model(world: World, directory: str) -> LanguageModel:
    return build_language_model(world, shape_in(directory), safetensors_weights(Path(directory)))


def build_language_model(world: World, shape: ModelShape, source: WeightSource) -> LanguageModel:
    return LanguageModel(shape, layout_of(world), ModelOptions(), source)


def trainable(model: LanguageModel, settings: OptimizerSettings, **options: Any) -> Trainable:
    with model.layout.active():
        return Trainable(model, settings, TrainingOptions(**options))

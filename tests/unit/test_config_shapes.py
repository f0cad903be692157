"""Shapes read from a ``config.json`` against what transformers builds from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.config.families import FAMILIES, VALUE_HEADS
from megarl.config.layout import critic_shape
from megarl.config.model_shape import RopeScaling, shape_from_hf, value_shape_from_hf
from megarl.core.errors import ConfigError
from tests.unit.config_files import MINIMAL, load_text, refusal

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXTRAS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": None},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 80},
    "Qwen3Moe": EXPERTS,
}


def written(family: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [f"{family}ForCausalLM"], **SIZES, **EXTRAS.get(family, {}), **changes}


def built(config: dict[str, Any]) -> Any:
    """The model of transformers, without memory for its weights."""
    (architecture,) = config["architectures"]
    cls = getattr(transformers, architecture)
    with torch.device("meta"):
        return cls(cls.config_class(**{key: value for key, value in config.items() if key != "architectures"}))


def weights_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in {id(one): one for one in model.parameters()}.values())


VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"head_dim": 24},
    {"num_key_value_heads": None},
]
SPARSE_VARIANTS: list[dict[str, Any]] = [
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0, 3]},
    {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_as_transformers_builds_them(family: str) -> None:
    for changes in VARIANTS + (SPARSE_VARIANTS if "Moe" in family else []):
        if family in ("Mistral", "Qwen2Moe", "Qwen3Moe") and "num_key_value_heads" in changes:
            continue  # transformers takes no null there
        config = written(family, **changes)
        model = built(config)
        assert shape_from_hf(config, "a test").num_parameters == weights_of(model), changes


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_transformers_means(family: str) -> None:
    required = {"vocab_size": 64, "hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 2}
    config = {"architectures": [f"{family}ForCausalLM"], **required, "num_attention_heads": 32}
    config |= {"sliding_window": None} if family == "Mistral" else {}
    shape, model = shape_from_hf(config, "a test"), built(config)
    theirs = model.config
    attention = model.model.layers[0].self_attn
    assert (shape.num_kv_heads, shape.head_dim) == (theirs.num_key_value_heads, attention.head_dim)
    assert (shape.rope_theta, shape.rms_norm_eps) == (theirs.rope_parameters["rope_theta"], theirs.rms_norm_eps)
    assert (shape.max_positions, shape.tied_embeddings) == (theirs.max_position_embeddings, theirs.tie_word_embeddings)
    assert shape.initializer_range == theirs.initializer_range
    assert shape.num_parameters == weights_of(model)
    if shape.experts is not None:
        experts = shape.experts
        assert (experts.num_experts, experts.num_experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert experts.normalize_top_k == theirs.norm_topk_prob


@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe"])
@pytest.mark.parametrize("changes", SPARSE_VARIANTS)
def test_the_sparse_layers_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    config = written(family, **changes)
    shape, model = shape_from_hf(config, "a test"), built(config)
    assert [shape.is_sparse(i) for i in range(4)] == [hasattr(layer.mlp, "experts") for layer in model.model.layers]


def test_a_file_that_transformers_wrote_is_read_back() -> None:
    for family in FAMILIES:
        config = written(family)
        saved = {**built(config).config.to_dict(), "architectures": config["architectures"]}
        assert shape_from_hf(saved, "a test") == shape_from_hf(config, "a test")


def test_a_mixture_without_sparse_layers_is_dense() -> None:
    config = written("Qwen3Moe", mlp_only_layers=[0, 1, 2, 3])
    assert shape_from_hf(config, "a test").experts is None
    assert shape_from_hf(config, "a test").num_parameters == weights_of(built(config))


# -- rotary embeddings

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES: list[dict[str, Any]] = [
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e5},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "beta_fast": 16, "beta_slow": 2}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "truncate": False, "mscale": 0.7}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
]


@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_rope_scaling_means_what_transformers_means(rope: dict[str, Any]) -> None:
    """Written down again from what was read, it gives transformers the same wavelengths to the bit."""
    config = written("Llama", **rope)
    theirs = built({**config, **{key: dict(value) for key, value in rope.items() if isinstance(value, dict)}}).config
    theta, scaling = (shape := shape_from_hf(config, "a test")).rope_theta, shape.rope_scaling
    assert isinstance(scaling, RopeScaling)
    again = {
        "rope_type": scaling.kind,
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
    if scaling.kind == "llama3":
        again |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        again |= {name: getattr(scaling, name) for name in names}
    ours = transformers.LlamaConfig(**SIZES, rope_parameters=again)
    mine, my_factor = ROPE_INIT_FUNCTIONS[scaling.kind](ours, torch.device("cpu"))
    wavelengths, factor = ROPE_INIT_FUNCTIONS[scaling.kind](theirs, torch.device("cpu"))
    assert torch.equal(mine, wavelengths)
    assert my_factor == factor


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "MRL-1205", "Supported: default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "MRL-1205", "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "MRL-1205", "factor must be given"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "MRL-1203", "factor='None' must be a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "MRL-1205", "low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "MRL-1205", "must be above"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "MRL-1205", "one mapping for all layers"),
        ({"partial_rotary_factor": 0.5}, "MRL-1205", "partial_rotary_factor"),
        ({"rope_scaling": 3}, "MRL-1205", "one mapping"),
        ({"architectures": ["GPT2LMHeadModel"]}, "MRL-1201", "Qwen3MoeForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "MRL-1201", "is not supported"),
        ({"layer_types": ["sliding_attention"]}, "MRL-1202", "layer_types"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 1, "norm_topk_prob": True},
            "MRL-1202",
            "norm_topk_prob=true with num_experts_per_tok=1",
        ),
        ({"num_hidden_layers": 10**9}, "MRL-1203", "at most 10000"),
        ({"tie_word_embeddings": "yes"}, "MRL-1203", "true or false"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "MRL-1202", "sliding_window=64 is shorter"),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, "MRL-1202", "sliding_window=4096"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "num_experts": 1},
            "MRL-1203",
            "more than num_experts=1",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": "0"}, "MRL-1203", "a list of layer numbers"),
    ],
)
def test_what_cannot_be_represented_is_refused(changes: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        shape_from_hf(written("Llama", **changes), "config.json")
    assert error.value.code == code
    assert words in str(error.value)


def test_a_window_as_long_as_the_model_hides_nothing() -> None:
    assert shape_from_hf(written("Mistral", sliding_window=256), "a test").max_positions == 256


# -- value models


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", VALUE_HEADS)
def test_value_models_are_counted_as_transformers_builds_them(family: str, head: str) -> None:
    config = written(family, architectures=[f"{family}{head}"], num_labels=1)
    model = built(config)
    assert value_shape_from_hf(config, "a test").num_parameters == weights_of(model)
    saved = {**model.config.to_dict(), "architectures": config["architectures"]}
    assert value_shape_from_hf(saved, "a test") == value_shape_from_hf(config, "a test")


def test_a_value_has_one_output() -> None:
    config = written("Llama", architectures=["LlamaForSequenceClassification"])
    for labels in ({}, {"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}):
        with pytest.raises(ConfigError, match="MRL-1207"):
            value_shape_from_hf({**config, **labels}, "a test")
    with pytest.raises(ConfigError, match="MRL-1201"):
        value_shape_from_hf(written("Llama"), "a test")


def write_value_model(directory: Path, **changes: Any) -> None:
    config = transformers.Qwen3Config(**{**SIZES, **changes}, num_labels=1)
    config.architectures = ["Qwen3ForSequenceClassification"]
    config.save_pretrained(directory)


def test_the_critic_has_its_own_shape_and_its_own_rules(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: grpo", "name: ppo")
    write_value_model(tmp_path / "value", num_attention_heads=6, num_key_value_heads=3, intermediate_size=96)
    given = f"critic.path={tmp_path}/value"
    config = load_text(tmp_path, text, given)
    assert critic_shape(config).num_kv_heads == 3
    fresh = critic_shape(load_text(tmp_path, text))
    assert (fresh.architecture, fresh.num_kv_heads) == ("Qwen3ForSequenceClassification", 2)
    message = refusal(tmp_path, text, given, "run.num_ranks=2", "actor.parallel.tp_size=2")
    assert "actor.parallel.tp_size=2 cannot split the model of critic.path: 3 kv heads / 2 is not whole." in message
    overrides = ("run.num_ranks=6", "critic.parallel={tp_size: 3}", "actor.parallel={tp_size: 2}")
    config = load_text(tmp_path, text, given, *overrides)
    assert (config.critic_parallel.tp_size, config.reference_parallel.tp_size) == (3, 2)
    assert (config.dp_size, config.dp_size_of(config.critic_parallel)) == (3, 2)


def test_the_critic_must_know_every_token_and_position(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: grpo", "name: ppo")
    write_value_model(tmp_path / "value", vocab_size=63, max_position_embeddings=44)
    message = refusal(tmp_path, text, f"critic.path={tmp_path}/value")
    assert "MRL-1113" in message
    assert "vocab_size=63 is smaller than the policy's 64" in message
    assert "MRL-1106" in message
    assert "the model of critic.path has max_position_embeddings=44" in message

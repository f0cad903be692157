"""Arithmetic of models, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.model_shape import shape_from_hf, value_shape_from_hf
from megarl.metrics.flops import Arithmetic, matmul_weights
from megarl.metrics.throughput import Derivation, Hardware, Workload

QWEN_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def test_the_output_projection_counts_and_the_embedding_does_not() -> None:
    assert matmul_weights(shape_from_hf(QWEN_0_5B, "test")) == 493_961_216  # with the look-up it would be 630,095,872


def test_a_critic_has_one_output() -> None:
    value = QWEN_0_5B | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    policy = matmul_weights(shape_from_hf(QWEN_0_5B, "test"))
    assert matmul_weights(value_shape_from_hf(value, "test")) == policy - 896 * (151936 - 1)


def test_experts_count_as_often_as_a_token_visits_them() -> None:
    moe = QWEN_0_5B | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    }
    hidden, attention = 896, 896 * (2 * 896 + 2 * 128)
    sparse = 3 * hidden * (2 * 512 + 1024) + hidden * 8 + hidden  # visited, shared, router, the shared one's gate
    expected = 24 * attention + 3 * hidden * 4864 + 23 * sparse + hidden * 151936
    assert matmul_weights(shape_from_hf(moe, "test")) == expected


def test_attention_grows_with_the_square_of_each_sequence() -> None:
    arithmetic = Arithmetic.of(shape_from_hf(QWEN_0_5B, "test"))
    # two sequences of 10 and 30 tokens: 2 per weight and token; 2 · heads · size · s² per layer, the causal half
    assert arithmetic.forward(40, 100 + 900) == 2 * 493_961_216 * 40 + 24 * 2 * 14 * 64 * 1000


def test_utilisation_is_work_over_what_all_devices_could_do() -> None:
    arithmetic = Arithmetic(2e9, 0.0)
    step = {
        "perf/total_num_tokens": 100.0,
        "perf/num_squared_tokens": 0.0,
        "time/actor_train/train_step/execute": 2.0,
        "time/actor_train/compute_log_probs/execute": 0.5,
    }
    known = Derivation(Hardware(4, 4e12), Workload(arithmetic)).derive(step, num_epochs=2)
    # forward and backward, twice: 3 · 2 · 2e9 · 100 operations, in 2 seconds of 4e12 per second
    assert known["perf/mfu/actor"] == pytest.approx(1.2e12 / 8e12)
    assert known["perf/mfu/actor_infer"] == pytest.approx(2e11 / 2e12)
    assert "perf/mfu/critic" not in known
    unknown = Derivation(Hardware(4, None), Workload(arithmetic)).derive(step)
    assert not any(name.startswith("perf/mfu/") for name in unknown)

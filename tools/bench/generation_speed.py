"""Embedded engine against Hugging Face `generate`: tokens per CPU-second, log-probs included, one thread.

    .venv/bin/python tools/bench/generation_speed.py [--rounds 5] [--sizes S,M]

Both sides draw at temperature 1 from the same random Qwen2 weights, for the same prompts (each wanted by a group of 8),
and compute the log-prob of every drawn token. Runs alternate, so that a busy machine hurts both; the ratio is taken
inside each round, and its median and range are printed. Hugging Face gets the batch size that suits it best.

- equal: no stop token, so every response has the same number of tokens.
- long-tail: the weights are bent so that the stop token has a steady probability of about 1/40. Neither side knows the
  lengths beforehand, and drawn lengths differ between the sides: only tokens up to the stop count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.config.model_shape import shape_from_hf
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.embedded import EmbeddedEngine

PAD, EOS, MEAN_LENGTH, GROUP_SIZE, MAX_PROMPT, NUM_SLOTS = 0, 1, 40, 8, 24, 64
# layers, hidden size, intermediate size, heads, vocabulary
SIZES = {"S": (4, 128, 512, 4, 512), "M": (8, 384, 1024, 6, 4096)}


@dataclass(frozen=True)
class Workload:
    """What is asked for: prompts, each as often as its group is large."""

    name: str
    prompts: list[np.ndarray]
    max_new_tokens: int
    stops: bool

    @classmethod
    def make(cls, kind: str, num_prompts: int, max_new_tokens: int) -> Workload:
        random = np.random.default_rng(0)
        prompts = [random.integers(2, 500, random.integers(6, MAX_PROMPT + 1)) for _ in range(num_prompts)]
        repeated = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
        return cls(f"{kind} {len(repeated)} x {max_new_tokens}", repeated, max_new_tokens, kind == "long-tail")


def make_model(size: str) -> Qwen2ForCausalLM:
    """Random weights; hidden unit 0 is a constant that only the stop token's logit reads."""
    torch.manual_seed(0)
    num_layers, hidden_size, intermediate_size, num_heads, vocab_size = SIZES[size]
    config = Qwen2Config(
        num_hidden_layers=num_layers, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_attention_heads=num_heads, num_key_value_heads=2, vocab_size=vocab_size,
        max_position_embeddings=1024, tie_word_embeddings=False,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        hidden = model.model(torch.randint(2, 500, (8, 32))).last_hidden_state
        model.lm_head.weight[EOS] = 0.0
        model.lm_head.weight[EOS, 0] = np.log(config.vocab_size / MEAN_LENGTH) / hidden[..., 0].mean()
    return model


def make_engine(model: Qwen2ForCausalLM, work: Workload) -> EmbeddedEngine:
    shape = shape_from_hf(model.config.to_dict(), "config")
    engine = EmbeddedEngine(shape, min(NUM_SLOTS, len(work.prompts)), MAX_PROMPT + work.max_new_tokens)
    engine.begin_weight_update()
    engine.update_weights(model.named_parameters())
    engine.end_weight_update(1)
    return engine


def run_engine(engine: EmbeddedEngine, work: Workload, seed: int) -> int:
    params = SamplingParams(work.max_new_tokens, stop_token_ids=(EOS,) if work.stops else ())
    requests = [
        GenerationRequest(str(index), prompt, seed * 10_000 + index, params)
        for index, prompt in enumerate(work.prompts)
    ]
    return sum(len(generation.token_ids) for generation in engine.generate(requests))


def run_hugging_face(model: Qwen2ForCausalLM, work: Workload, batch_size: int, seed: int) -> int:
    """Left-padded batches; the log-prob of each drawn token from the logits that `generate` keeps."""
    torch.manual_seed(seed)
    num_tokens = 0
    for start in range(0, len(work.prompts), batch_size):
        prompts = work.prompts[start : start + batch_size]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), PAD)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=(ids != PAD).long(),
                max_new_tokens=work.max_new_tokens,
                do_sample=True,
                top_k=0,
                eos_token_id=EOS if work.stops else None,
                return_dict_in_generate=True,
                output_logits=True,
            )
            drawn = out.sequences[:, width:]
            for step, logits in enumerate(out.logits):
                logits.log_softmax(-1).gather(1, drawn[:, step : step + 1])
        ended = (drawn == EOS).long().cumsum(1) if work.stops else torch.zeros_like(drawn)
        num_tokens += int(((ended == 0) | ((ended == 1) & (drawn == EOS))).sum())
    return num_tokens


def tokens_per_cpu_second(run: Callable[..., int], *arguments: object) -> float:
    start = time.process_time()
    num_tokens = run(*arguments)
    return num_tokens / (time.process_time() - start)


def compare(model: Qwen2ForCausalLM, work: Workload, num_rounds: int) -> str:
    engine = make_engine(model, work)
    num_tokens = run_engine(engine, work, seed=0)
    batch_sizes = [size for size in (16, 64, 256) if size <= len(work.prompts)]
    tried = {size: tokens_per_cpu_second(run_hugging_face, model, work, size, 0) for size in batch_sizes}
    batch_size = max(tried, key=tried.__getitem__)
    ours, theirs = [], []
    for seed in range(1, num_rounds + 1):
        ours.append(tokens_per_cpu_second(run_engine, engine, work, seed))
        theirs.append(tokens_per_cpu_second(run_hugging_face, model, work, batch_size, seed))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (
        f"{work.name:20} {num_tokens / len(work.prompts):6.0f} {statistics.median(ours):8.0f} "
        f"{statistics.median(theirs):8.0f} {batch_size:6} {statistics.median(ratios):7.2f}x  "
        f"({min(ratios):.2f}-{max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="S,M")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"tokens per CPU-second, 1 thread, {arguments.rounds} alternated rounds, load {os.getloadavg()[0]:.1f}")
    print(f"   {'workload':20} {'length':>6} {'megarl':>8} {'HF':>8} {'batch':>6}  ratio, median (min-max)")
    for size in arguments.sizes.split(","):
        model = make_model(size)
        many, few = {"S": (32, 8), "M": (16, 4)}[size]
        for work in (
            Workload.make("equal", many, 32),
            Workload.make("equal", few, 256),
            Workload.make("long-tail", many, 256),
        ):
            print(f"{size}  {compare(model, work, arguments.rounds)}", flush=True)


if __name__ == "__main__":
    main()

"""Embedded engine against Hugging Face `generate`: tokens per CPU-second, log-probs included, one thread.

    .venv/bin/python tools/bench/generation_speed.py [--rounds 5] [--sizes 6M,32M]

Both sides draw at temperature 1 from the same random Qwen3 weights for the same prompts, and compute the log-prob of
every drawn token. Hugging Face runs with sdpa attention and its dynamic cache (the fastest of its caches on a CPU).
Runs alternate, so that a busy machine hurts both; the ratio is taken inside each round, and its median and range are
printed.

- equal: 32 requests of 32 prompt tokens and 128 new ones, in one batch of 32 on both sides.
- long-tail: 128 requests whose lengths are drawn from a long-tailed distribution (mean 1/9 of the longest). The engine
  has 32 slots; Hugging Face gets the batch size that suits it best, ends each row at its length by a stopping
  criterion, and runs until the longest row of the batch has ended. Only the tokens that were asked for count.
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
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList

from megarl.config.model_shape import shape_from_hf
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.embedded import EmbeddedEngine

NUM_SLOTS, PROMPT_LENGTH, VOCAB_SIZE = 32, 32, 512
# layers, hidden size, intermediate size, heads, kv heads
SIZES = {"6M": (8, 256, 768, 4, 2), "32M": (10, 512, 1536, 8, 4)}


@dataclass(frozen=True)
class Workload:
    """Prompts of one length, and how many tokens each of them gets."""

    name: str
    prompts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def equal(cls) -> Workload:
        return cls("equal, 32 x 128", _prompts(32), np.full(32, 128))

    @classmethod
    def long_tail(cls) -> Workload:
        random = np.random.default_rng(1)
        lengths = np.clip(np.exp(random.normal(2.9, 1.05, 128)), 1, 256).astype(np.int64)
        lengths[random.integers(128)] = 256
        return cls(f"long-tail, 128 x {lengths.mean():.0f}", _prompts(128), lengths)


def _prompts(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2, VOCAB_SIZE, (count, PROMPT_LENGTH))


class RowLengths(StoppingCriteria):
    """Each row ends at its own length; `generate` ends with the last of them."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = torch.from_numpy(lengths)

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_kwargs: object) -> torch.Tensor:
        return self._lengths <= input_ids.shape[1] - PROMPT_LENGTH


def make_model(size: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads = SIZES[size]
    config = Qwen3Config(
        num_hidden_layers=num_layers, hidden_size=hidden_size, intermediate_size=intermediate_size, head_dim=64,
        num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024, tie_word_embeddings=True, attn_implementation="sdpa",
        pad_token_id=0, eos_token_id=None, bos_token_id=None, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def make_engine(model: Qwen3ForCausalLM, work: Workload) -> EmbeddedEngine:
    shape = shape_from_hf(model.config.to_dict(), "config")
    engine = EmbeddedEngine(shape, NUM_SLOTS, PROMPT_LENGTH + int(work.lengths.max()))
    engine.begin_weight_update()
    engine.update_weights(model.named_parameters())
    engine.end_weight_update(1)
    return engine


def run_engine(engine: EmbeddedEngine, work: Workload, seed: int) -> int:
    requests = [
        GenerationRequest(str(index), prompt, seed * 10_000 + index, SamplingParams(int(length)))
        for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    return sum(len(generation.token_ids) for generation in engine.generate(requests))


def run_hugging_face(model: Qwen3ForCausalLM, work: Workload, batch_size: int, seed: int) -> int:
    """The log-prob of each drawn token comes from the logits that `generate` keeps."""
    torch.manual_seed(seed)
    for start in range(0, len(work.prompts), batch_size):
        ids = torch.from_numpy(work.prompts[start : start + batch_size])
        lengths = work.lengths[start : start + batch_size]
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=int(lengths.max()),
                do_sample=True,
                top_k=0,
                cache_implementation=None,
                return_dict_in_generate=True,
                output_logits=True,
                stopping_criteria=StoppingCriteriaList([RowLengths(lengths)]),
            )
            drawn = out.sequences[:, PROMPT_LENGTH:]
            assert drawn.shape[1] == lengths.max()
            for step, logits in enumerate(out.logits):
                logits.log_softmax(-1).gather(1, drawn[:, step : step + 1])
    return int(work.lengths.sum())


def tokens_per_cpu_second(run: Callable[..., int], *arguments: object) -> float:
    start = time.process_time()
    num_tokens = run(*arguments)
    return num_tokens / (time.process_time() - start)


def compare(model: Qwen3ForCausalLM, work: Workload, num_rounds: int) -> str:
    engine = make_engine(model, work)
    run_engine(engine, work, seed=0)
    batch_sizes = sorted({NUM_SLOTS, len(work.prompts)})
    tried = {size: tokens_per_cpu_second(run_hugging_face, model, work, size, 0) for size in batch_sizes}
    batch_size = max(tried, key=tried.__getitem__)
    ours, theirs = [], []
    for seed in range(1, num_rounds + 1):
        ours.append(tokens_per_cpu_second(run_engine, engine, work, seed))
        theirs.append(tokens_per_cpu_second(run_hugging_face, model, work, batch_size, seed))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (
        f"{work.name:20} {statistics.median(ours):8.0f} {statistics.median(theirs):8.0f} {batch_size:6} "
        f"{statistics.median(ratios):7.2f}x  ({min(ratios):.2f}-{max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"tokens per CPU-second, 1 thread, {arguments.rounds} alternated rounds, load {os.getloadavg()[0]:.1f}")
    print(f"      {'workload':20} {'megarl':>8} {'HF':>8} {'batch':>6}  ratio, median (min-max)")
    for size in arguments.sizes.split(","):
        model = make_model(size)
        for work in (Workload.equal(), Workload.long_tail()):
            print(f"{size:4}  {compare(model, work, arguments.rounds)}", flush=True)


if __name__ == "__main__":
    main()

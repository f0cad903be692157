"""Embedded engine against Hugging Face `generate`: tokens per CPU-second, log-probs included, one thread.

    .venv/bin/python tools/bench/generation_speed.py [--rounds 5] [--sizes S,M]

Both sides draw at temperature 1 from the same random Qwen2 weights, for the same prompts (each asked for by a group of 8),
and hand back the log-prob of every drawn token. Runs alternate, so that a busy machine hurts both; the ratio is taken
inside each round, and its median and range are printed.

- equal: every response has the same number of tokens.
- long-tail: response lengths are log-normal (mean about a quarter of the longest). The engine gets them as its limits. Hugging
  Face has one limit per call and a stop criterion per row: a finished row is padded until the longest one is done.
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
from transformers import LogitsProcessor, LogitsProcessorList, Qwen2Config, Qwen2ForCausalLM

from megarl.config.model_shape import shape_from_hf
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.embedded import EmbeddedEngine

PAD, EOS = 0, 1
GROUP_SIZE = 8
SIZES = {
    "S": {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512},
    "M": {"num_hidden_layers": 8, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "vocab_size": 4096},
}


@dataclass(frozen=True)
class Workload:
    """Prompts, each repeated for its group, and how many tokens each response has."""

    name: str
    prompts: list[np.ndarray]
    lengths: list[int]
    num_slots: int


class StopAtLength(LogitsProcessor):
    """Lets Hugging Face end each row at its own length: no EOS before it, only EOS at it."""

    def __init__(self, prompt_length: int, lengths: list[int]) -> None:
        self._prompt_length = prompt_length
        self._lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        step = input_ids.shape[1] - self._prompt_length + 1
        scores[:, EOS] = torch.where(self._lengths <= step, 1e4, -1e4)
        return scores


def make_workload(kind: str, num_prompts: int, max_new: int, num_slots: int, vocab_size: int) -> Workload:
    random = np.random.default_rng(0)
    count = num_prompts * GROUP_SIZE
    prompts = [random.integers(3, vocab_size, random.integers(6, 24)) for _ in range(num_prompts)]
    lengths = np.full(count, max_new)
    if kind == "long-tail":
        # sigma 1: the mean is about 1/7 of the longest of a few hundred, as in answers that stop by themselves
        lengths = np.clip(random.lognormal(np.log(max_new / 8) - 0.5, 1.0, count).astype(int), 1, max_new)
        lengths[random.integers(count)] = max_new
    repeated = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    return Workload(f"{kind} {count} x {max_new}", repeated, lengths.tolist(), num_slots)


def run_engine(engine: EmbeddedEngine, work: Workload) -> int:
    requests = [
        GenerationRequest(str(i), prompt, i, SamplingParams(max_new_tokens=length))
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]
    return sum(len(done.token_ids) for done in engine.generate(requests))


def run_hugging_face(model: Qwen2ForCausalLM, work: Workload, batch_size: int) -> int:
    """Left-padded batches; the log-prob of each drawn token from the logits that `generate` keeps."""
    num_tokens = 0
    for start in range(0, len(work.prompts), batch_size):
        prompts, lengths = work.prompts[start : start + batch_size], work.lengths[start : start + batch_size]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), PAD)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=(ids != PAD).long(),
                max_new_tokens=max(lengths),
                do_sample=True,
                top_k=0,
                logits_processor=LogitsProcessorList([StopAtLength(width, lengths)]),
                return_dict_in_generate=True,
                output_logits=True,
            )
            drawn = out.sequences[:, width:]
            for step, logits in enumerate(out.logits):
                logits.log_softmax(-1).gather(1, drawn[:, step : step + 1])
        num_tokens += sum(lengths)
    return num_tokens


def tokens_per_cpu_second(run: Callable[[], int]) -> float:
    start = time.process_time()
    num_tokens = run()
    return num_tokens / (time.process_time() - start)


def best_batch_size(model: Qwen2ForCausalLM, work: Workload) -> int:
    """Hugging Face gets the batch size that suits it best here."""
    sizes = [size for size in (16, 64, 256) if size <= len(work.prompts)]
    return max(sizes, key=lambda size: tokens_per_cpu_second(lambda: run_hugging_face(model, work, size)))


def compare(model: Qwen2ForCausalLM, engine: EmbeddedEngine, work: Workload, num_rounds: int) -> str:
    batch_size = best_batch_size(model, work)
    run_engine(engine, work)
    ours, theirs = [], []
    for _ in range(num_rounds):
        ours.append(tokens_per_cpu_second(lambda: run_engine(engine, work)))
        theirs.append(tokens_per_cpu_second(lambda: run_hugging_face(model, work, batch_size)))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (
        f"{work.name:22} {statistics.median(ours):9.0f} {statistics.median(theirs):9.0f} (batch {batch_size:3}) "
        f"{statistics.median(ratios):6.2f}x  ({min(ratios):.2f}-{max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="S,M")
    parser.add_argument("--only", default="", help="run workloads whose name begins so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':2} {'workload':22} {'megarl':>9} {'HF':>9} tokens per CPU-second; ratio, median (min-max); load {os.getloadavg()[0]:.1f}")
    for size in arguments.sizes.split(","):
        torch.manual_seed(0)
        config = Qwen2Config(
            **SIZES[size], num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
            pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, architectures=["Qwen2ForCausalLM"],
        )  # fmt: skip
        model = Qwen2ForCausalLM(config).eval()
        num_prompts = {"S": 32, "M": 8}[size]
        for kind, max_new in (("equal", 32), ("equal", 256), ("long-tail", 256)):
            if not kind.startswith(arguments.only):
                continue
            prompts = num_prompts if max_new == 32 or kind == "long-tail" else num_prompts // 4
            work = make_workload(kind, prompts, max_new, 64, config.vocab_size)
            engine = EmbeddedEngine(shape_from_hf(config.to_dict(), "config"), min(work.num_slots, len(work.prompts)), 24 + max_new)
            engine.begin_weight_update()
            engine.update_weights((n, t) for n, t in model.state_dict().items() if n != "lm_head.weight")
            engine.end_weight_update(1)
            print(f"{size:2} {compare(model, engine, work, arguments.rounds)}", flush=True)


if __name__ == "__main__":
    main()

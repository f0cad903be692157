"""Import a Hugging Face directory into Megatron in some layout, and compare its logits with those of `transformers`.

Start it with one process per rank: ``torchrun --standalone --nproc-per-node 2 compare_logits.py MODEL --pp-size 2``.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaForCausalLM

from megarl.config.model_shape import read_hf_config, shape_from_hf
from megarl.config.parallel import ParallelSettings
from megarl.core.batch import MicroBatch
from megarl.core.sample import Group, Prompt, Sample
from megarl.data.pack import PackPlan, pack
from megarl.launch.rendezvous import identify
from megarl.models.build import ModelOptions
from megarl.models.cuts import Part
from megarl.models.decoder import LanguageModel
from megarl.models.hf_weights import WeightSource, safetensors_weights
from megarl.models.layout import Layout
from megarl.models.packed import PackedMicroBatch
from megarl.models.pipeline import forward_only
from megarl.models.rendezvous import Rendezvous
from megarl.models.setup import lay_out, start_world, stop_world

# of different lengths, to see that packed sequences do not look at each other
TEXTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital is Paris.",
    "3 + 4 = 7\n25 + 31 = 56\n8 + 9 = 17",
)


def packed(sequences: list[list[int]]) -> MicroBatch:
    """The sequences laid end to end as in a training step, in whichever order that chooses."""
    samples = [
        Sample(np.array(ids), np.zeros(len(ids), dtype=np.int8), np.zeros(len(ids), dtype=np.float32), "stop")
        for ids in sequences
    ]
    group = Group(Prompt("texts", "", np.array(sequences[0])), samples)
    num_tokens = sum(map(len, sequences))
    (batch,) = pack([group], PackPlan(dp_size=1, num_minibatches=1, max_tokens_per_microbatch=num_tokens))
    return next(batch.microbatches())


def megatron_logits(model: LanguageModel, micro: MicroBatch, layout: Layout) -> torch.Tensor:
    """[T, vocabulary] on every rank. Collective."""
    tp = layout.world.tp

    def read(hidden: torch.Tensor, batch: PackedMicroBatch) -> torch.Tensor:
        # the embedding is the output layer, too: SmolLM2 ties them
        logits = hidden @ model.chunks[-1].shared_embedding_or_output_weight().T
        columns = [torch.empty_like(logits) for _ in range(tp.size)]
        dist.all_gather(columns, logits.contiguous(), group=tp.group)
        return batch.to_tokens(torch.cat(columns, dim=1)[:, : model.shape.vocab_size].T.contiguous())

    with layout.active():
        (logits,) = forward_only(model.chunks, [micro], read, layout)
    return logits.T


def num_exported_unchanged(model: LanguageModel, source: WeightSource) -> int:
    """How many tensors the model gives back as they are in the file; one that is not ends the program. Collective."""
    num_tensors = 0
    for bucket in model.export():
        for name, tensor in bucket:
            whole = tuple(tensor.shape)
            if not torch.equal(tensor, source(name, whole, Part(0, 0, whole[0]))):
                raise SystemExit(f"{name} is not what it was in the file")
            num_tensors += 1
    return num_tensors


def report(directory: Path, micro: MicroBatch, logits: torch.Tensor) -> str:
    """What the other side says about each sequence alone, and how far apart they are."""
    sequences = micro.token_ids.split(micro.cu_seqlens.diff().tolist())
    reference = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([reference(ids[None]).logits[0] for ids in sequences])
    gap = (logits - expected).abs()
    num_agreed = int((logits.argmax(dim=1) == expected.argmax(dim=1)).sum())
    lengths = " + ".join(str(len(ids)) for ids in sequences)
    return (
        f"logits of {lengths} tokens x {expected.shape[1]:,}: largest |logit| {expected.abs().max():.2f}, "
        f"largest difference {gap.max():.2e}, mean difference {gap.mean():.2e}, "
        f"same likeliest token at {num_agreed} of {len(expected)} positions"
    )


def main() -> None:
    """Import, export, compare; the first rank reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face directory with tied embeddings")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    own = identify(os.environ)
    assert own is not None, "start it with torchrun"
    parallel = ParallelSettings(tp_size=arguments.tp_size, pp_size=arguments.pp_size)
    world = start_world(Rendezvous(own.rank, own.size, own.local_rank, own.meeting), "cpu", parallel)
    layout = lay_out(world, parallel)
    source = safetensors_weights(arguments.model)
    shape = shape_from_hf(read_hf_config(arguments.model), str(arguments.model))
    model = LanguageModel(shape, layout, ModelOptions(), source)
    num_tensors = num_exported_unchanged(model, source)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    sequences = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    micro = packed(sequences)
    logits = megatron_logits(model, micro, layout)
    if world.is_driver:
        sys.stdout.write(
            f"TP{parallel.tp_size} PP{parallel.pp_size}, {own.size} rank(s): {num_tensors} tensors imported and "
            f"exported byte for byte\n  {report(arguments.model, micro, logits)}\n"
        )
    world.barrier()
    stop_world()


if __name__ == "__main__":
    main()

"""Peak memory of log-probs and entropies with a vocabulary of 150,000: ``python tools/bench/logprob_memory.py``.

The naive way computes all logits, then `log_softmax`, then the entropy, and lets autograd keep what it likes. The
chunked way is `megarl.ops.logprobs.hidden_logprobs`. Each runs forward and backward once, in a process of its own;
printed is the kernel's high-water mark of the resident set (VmHWM) above what was resident before, which includes the
gradients of the hidden states and of the output layer, and the CPU time. ``--plan naive:8192:0,chunked:8192:256`` asks
for other (way, tokens, tokens per chunk; 0 is all).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

VOCAB_SIZE, HIDDEN_SIZE = 150_000, 128
PLAN = "naive:1024:0,naive:2048:0,chunked:2048:0,chunked:2048:1024,chunked:2048:256,chunked:8192:256"
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=PLAN)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        measure(*arguments.only.split(":"))
        return
    print(f"vocabulary {VOCAB_SIZE:,}, hidden size {HIDDEN_SIZE}, fp32, forward and backward; MiB", flush=True)
    print("way        tokens   chunk   all logits   peak above start   of it gradients   CPU s", flush=True)
    for way in arguments.plan.split(","):
        subprocess.run([sys.executable, __file__, "--only", way], check=True)


def measure(way: str, tokens: str, chunk: str) -> None:
    import torch
    import torch.distributed as dist

    from megarl.ops.logprobs import hidden_logprobs

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    num_tokens, chunk_tokens = int(tokens), int(chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).requires_grad_()
    weight = (torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) / 8).requires_grad_()
    targets = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator)

    def head() -> tuple[torch.Tensor, torch.Tensor]:
        if way == "chunked":
            assert dist.group.WORLD is not None
            return hidden_logprobs(
                hidden, weight, targets, group=dist.group.WORLD, first_column=0, num_columns=VOCAB_SIZE,
                temperature=1.0, chunk_tokens=chunk_tokens,
            )  # fmt: skip
        log_p = torch.log_softmax(hidden @ weight.T, dim=1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before, start = status("VmRSS"), time.process_time()
    logprobs, entropy = head()
    (logprobs.mean() + 0.01 * entropy.mean()).backward()
    seconds, peak = time.process_time() - start, status("VmHWM") - before
    gradients = 4 * HIDDEN_SIZE * (VOCAB_SIZE + num_tokens) / MIB
    print(
        f"{way:8} {num_tokens:8,} {chunk_tokens or 'all':>7} {4 * num_tokens * VOCAB_SIZE / MIB:12,.0f} "
        f"{peak / MIB:18,.0f} {gradients:17,.0f} {seconds:7.1f}",
        flush=True,
    )


def status(name: str) -> int:
    """A figure of this process in bytes, as the kernel has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()

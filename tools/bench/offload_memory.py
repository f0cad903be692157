"""How much memory offloading gives back, and how fast: ``python tools/bench/offload_memory.py``.

One rank, an actor of about 100 million parameters with gradients and Adam state. Prints the resident set of the process
and the seconds of each move. On CPU the device is the process; see docs/concepts.md.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.filterwarnings("ignore")

import torch  # noqa: E402

from megarl.config.model_shape import ModelShape  # noqa: E402
from megarl.core.device import process_memory, release_freed_memory  # noqa: E402
from megarl.models.decoder import LanguageModel  # noqa: E402
from megarl.models.hf_weights import random_weights  # noqa: E402
from megarl.models.optim import OptimizerSettings  # noqa: E402
from megarl.models.policy import Policy  # noqa: E402
from megarl.models.rendezvous import Rendezvous  # noqa: E402
from megarl.models.setup import start_world, stop_world  # noqa: E402

SHAPE = ModelShape(
    architecture="Qwen3ForCausalLM", vocab_size=32000, hidden_size=768, intermediate_size=2304, num_layers=8,
    num_heads=12, num_kv_heads=4, head_dim=64, rms_norm_eps=1e-6, rope_theta=1e4, max_positions=1024,
    tied_embeddings=False, qkv_bias=False, qk_norm=True, initializer_range=0.02,
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        world = start_world(Rendezvous(0, 1, 0, f"file://{Path(directory) / 'store'}"), "cpu", 1, 1)
        model = LanguageModel(SHAPE, world, random_weights(0, 0.02))
        policy = Policy(model, world, OptimizerSettings(lr=1e-4, num_updates=1), 1.0)
        trainable = policy._trainable
        trainable.zero_grad()
        trainable.step()  # Adam's state appears with the first step
        sizes = {name: part.num_bytes for name, part in policy.parts.items()}
        print(f"{SHAPE.num_parameters:,} parameters;", ", ".join(f"{k} {v / 2**20:,.0f} MiB" for k, v in sizes.items()))
        show("all resident", 0.0, 0)
        for name, part in policy.parts.items():
            start = time.monotonic()
            part.offload()
            release_freed_memory(world.device)
            show(f"without {name}", time.monotonic() - start, sizes[name])
        for name, part in policy.parts.items():
            start = time.monotonic()
            part.onload()
            show(f"with {name} again", time.monotonic() - start, sizes[name])
        stop_world()


def show(what: str, seconds: float, num_bytes: int) -> None:
    rate = f"{num_bytes / 2**30 / seconds:6.2f} GiB/s" if seconds else ""
    print(f"{what:30} resident set {process_memory()[0] * 1024:8,.0f} MiB  {seconds:7.3f} s {rate}")


if __name__ == "__main__":
    main()

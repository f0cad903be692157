"""Seconds that a push takes by each road, against one memcpy of the same bytes.

``python tools/bench/push_speed.py [--rounds N] [--buckets 1,4,16,64]`` pushes about 128 MB of weights, in 300 tensors,
from this process to one embedded server on this machine. Roads and memcpy take turns, and the median counts. A push is
all of it: pause, begin, every bucket, end, the checksum on both sides, continue.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from megarl.config.model_shape import shape_from_hf
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import EngineKind
from megarl.generation.embedded.weights import DecoderWeights
from megarl.generation.http.client import EngineClient
from megarl.weights.broadcast import BroadcastRoad
from megarl.weights.disk import DiskRoad
from megarl.weights.road import Road
from megarl.weights.servers import ServerTransport
from megarl.weights.tensor import TensorRoad
from tests.unit.one_rank import one_rank_world

# 27 layers of 11 tensors, 3 more; 128 MB in fp32
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 384,
    "intermediate_size": 512, "num_hidden_layers": 27, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 64, "max_position_embeddings": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu",
}  # fmt: skip
MIB = 2**20


class Fleet:
    """One server that must take everything."""

    def __init__(self, url: str) -> None:
        self._url = url

    def targets(self) -> list[str]:
        return [self._url]

    def pushed(self, url: str, version: int, problem: str | None) -> None:
        if problem is not None:
            raise SystemExit(f"the push of version {version} to {url} failed: {problem}")


class Client(EngineClient):
    async def kind(self) -> EngineKind:
        return EngineKind("embedded", (0, 1))


def start_server() -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "megarl.generation.embedded.serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"model_config": CONFIG, "num_slots": 1, "max_sequence_length": 32}) + "\n")
    process.stdin.flush()
    return process, f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"


def memcpy_seconds(num_bytes: int) -> Callable[[], float]:
    source, target = (ctypes.create_string_buffer(num_bytes) for _ in range(2))
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def measure() -> float:
        begin = time.perf_counter()
        copy(target, source, num_bytes)
        return time.perf_counter() - begin

    measure()
    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buckets", default="", help="MiB of a bucket, several to compare; default: those chosen")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights = DecoderWeights(shape_from_hf(CONFIG, "bench"), torch.device("cpu"), torch.float32)
    tensors = [(name, torch.randn(tensor.shape)) for name, tensor in weights.items()]
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    process, url = start_server()
    try:
        with one_rank_world() as world, tempfile.TemporaryDirectory() as directory:
            measure(
                url, tensors, [int(b) for b in arguments.buckets.split(",") if b], arguments.rounds, world, directory
            )
    finally:
        process.kill()
        process.wait()
    sys.stdout.write(f"{len(tensors)} tensors, {num_bytes / 1e6:.0f} MB\n")


def measure(url: str, tensors: list[Any], buckets: list[int], rounds: int, world: Any, directory: str) -> None:
    def export() -> Iterator[list[Any]]:
        yield from (tensors[start : start + 100] for start in range(0, len(tensors), 100))

    def of_size(size: int | None) -> dict[str, Road]:
        options = {} if size is None else {"bucket_bytes": size * MIB}
        label = "" if size is None else f" {size} MiB"
        return {
            f"tensor{label}": TensorRoad(**options),
            f"broadcast{label}": BroadcastRoad(torch.device("cpu"), **options),
            f"disk{label}": DiskRoad(Path(directory) / (label or "chosen"), CONFIG, **options),
        }

    roads = {name: road for size in buckets or [None] for name, road in of_size(size).items()}
    loop, client = LoopThread("bench"), Client(url, None, None, vocab_size=2048)
    transports = {
        name: ServerTransport(export, {}, lambda _: client, Fleet(url), road, world, loop)
        for name, road in roads.items()
    }
    memcpy = memcpy_seconds(sum(tensor.nbytes for _, tensor in tensors))
    seconds: dict[str, list[float]] = {name: [] for name in ["memcpy", *transports]}
    for version in range(1, rounds + 2):
        seconds["memcpy"].append(memcpy())
        for name, transport in transports.items():
            begin = time.perf_counter()
            transport.push(version)
            seconds[name].append(time.perf_counter() - begin)
    # the first round warms up
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    sys.stdout.write(f"{'':<18} {'median ms':>10} {'least ms':>10} {'x memcpy':>9}\n")
    for name, median in medians.items():
        least = min(seconds[name][1:])
        sys.stdout.write(f"{name:<18} {median * 1e3:10.0f} {least * 1e3:10.0f} {median / medians['memcpy']:9.1f}\n")
    loop.run(client.close())
    loop.close()


if __name__ == "__main__":
    main()

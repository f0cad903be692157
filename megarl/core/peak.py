"""What a device could compute at best: the denominator of model FLOPs utilisation.

GPUs are looked up by name (dense bf16, as the vendor states it). A CPU is measured: the best of a few large matrix
products, with the threads that this rank has, while every other rank on the machine does the same.
"""

from __future__ import annotations

import time

import torch

# 1e12 operations per second, by a part of the device's name; the more specific name first. None has been checked here.
_GPU_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}
_SIZE = 1024
_NUM_PRODUCTS = 8


def peak_tflops(device: torch.device, name: str) -> float | None:
    """The peak in 1e12 operations per second; None for a GPU that is not in the table."""
    if device.type == "cuda":
        return next((peak for part, peak in _GPU_TFLOPS.items() if part in name), None)
    return _measured()


def _measured() -> float:
    left, right = torch.ones(_SIZE, _SIZE), torch.ones(_SIZE, _SIZE)
    out = torch.empty(_SIZE, _SIZE)
    best_seconds = float("inf")
    for _ in range(_NUM_PRODUCTS):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2 * _SIZE**3 / best_seconds / 1e12

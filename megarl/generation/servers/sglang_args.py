"""The options that SGLang's server is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.sglang_fields import DECIDED_BY


@dataclass(frozen=True, slots=True)
class SglangModel:
    """What one server serves and on which devices."""

    directory: Path
    dtype: str
    max_sequence_length: int
    num_slots: int
    tp_size: int = 1
    device: str = "cpu"
    colocated: bool = False
    seed: int = 0


def sglang_args(model: SglangModel, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ServerArgs but the address and the keys. Weights come with the first push, tokens are never text."""
    args: dict[str, Any] = {
        "dtype": model.dtype,
        "context_length": model.max_sequence_length,
        "max_running_requests": model.num_slots,
        "random_seed": model.seed % 2**31,
    }
    if model.device == "cpu":
        args |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.1,
            "max_total_tokens": model.max_sequence_length * model.num_slots,
            "sleep_on_idle": True,  # an idle scheduler would keep a core busy
        }
    elif model.colocated:
        args["enable_memory_saver"] = True
    decided = {
        "model_path": str(model.directory),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "trust_remote_code": False,
        "skip_server_warmup": True,
        "tp_size": model.tp_size,
        "device": model.device,
    }
    assert not DECIDED_BY.keys() & overrides.keys(), "checked with the configuration"
    return args | dict(overrides) | decided


def sglang_environment(device: str) -> dict[str, str]:
    """Variables that the server needs. Its health route must answer while it is paused, so it may not generate."""
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if device == "cpu":
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return environment

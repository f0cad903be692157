"""Megatron-Core on CPU: the import hook rewrites what it must, where it must, and refuses unverified versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import megarl

CPU_MODULE = Path(megarl.__file__).parent / "models" / "cpu.py"
# The vendor's modules that run in every training step.
REWRITTEN = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.attention",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
)


def run_python(code: str) -> str:
    """In a process that has not imported Megatron; ``cpu`` is our module, loaded without its package."""
    start = (
        "import importlib.util, sys, warnings; warnings.filterwarnings('ignore')\n"
        f"spec = importlib.util.spec_from_file_location('cpu', {str(CPU_MODULE)!r})\n"
        "cpu = importlib.util.module_from_spec(spec); spec.loader.exec_module(cpu)\n"
    )
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def symbols_job(world: Any) -> tuple[list[str], int]:
    from megarl.models import cpu

    cpu.install()  # once more: nothing happens
    return cpu.missing_symbols(), sum(isinstance(finder, cpu._Finder) for finder in sys.meta_path)


def test_the_installed_megatron_has_every_symbol_and_the_hook_is_there_once(gang: Any) -> None:
    assert gang(1).run(symbols_job) == [([], 1)]


def test_another_version_is_refused_by_name_of_what_broke() -> None:
    said = run_python(
        "cpu.VERIFIED_VERSION = '0.1.0'\n"
        "cpu.RELIED_ON = {\n"
        "    'megatron.core.packed_seq_params:PackedSeqParams': 'is there',\n"
        "    'megatron.core.packed_seq_params:Renamed': 'is gone',\n"
        "    'megatron.core.moved_away:Anything': 'is gone with its module',\n"
        "}\n"
        "try:\n"
        "    cpu.install()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "print(sum(isinstance(finder, cpu._Finder) for finder in sys.meta_path))\n"
    )
    message, num_finders = said.strip().splitlines()[-2:]
    assert "0.16.1 is installed" in message
    assert "verified with 0.1.0" in message
    assert "megatron.core.packed_seq_params:Renamed" in message
    assert "megatron.core.moved_away:Anything" in message
    assert "PackedSeqParams" not in message
    assert num_finders == "0"


def test_the_hook_stays_away_from_cuda_and_from_latecomers() -> None:
    """With CUDA nothing may be rewritten; after Megatron was imported, nothing can be."""
    said = run_python(
        "import torch, types\n"
        "before = list(sys.meta_path)\n"
        "torch.cuda.is_available = lambda: True\n"
        "cpu.install()\n"
        "import megarl.models\n"
        "print(sys.meta_path == before, any(name.startswith('megatron') for name in sys.modules))\n"
        "torch.cuda.is_available = lambda: False\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "try:\n"
        "    cpu.install()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert said.splitlines() == ["True False", "megatron.core was imported before megarl.models.cpu.install()"]


def rewritten_job(world: Any) -> dict[str, list[str]]:
    """Mentions of the CUDA device in the modules as they were compiled."""
    import importlib

    def codes(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from codes(constant)

    def texts(constant: Any) -> Iterator[str]:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            for inner in constant:
                yield from texts(inner)

    found: dict[str, list[str]] = {}
    for name in REWRITTEN:
        module = importlib.import_module(name)
        assert module.__loader__ is not None
        mentions = found[name] = []
        for code in codes(module.__loader__.get_code(name)):  # type: ignore[attr-defined]
            literals = [text for constant in code.co_consts for text in texts(constant)]
            mentions += [text for text in literals if text in ("cuda", "cuda:") or text.startswith("torch.cuda.")]
            mentions += [f"{code.co_name}: .cuda" for used in code.co_names if used == "cuda"]
    return found


def test_no_module_in_use_names_the_cuda_device(gang: Any) -> None:
    (found,) = gang(1).run(rewritten_job)
    assert found == {name: [] for name in REWRITTEN}


def layers_job(world: Any) -> None:
    """A tensor-parallel layer as Megatron builds it, initialisation included, forwards and backwards."""
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, get_cuda_rng_tracker

    layer = ColumnParallelLinear(
        4, 6, config=ModelParallelConfig(), init_method=torch.nn.init.ones_, gather_output=True, bias=True
    )
    output, _ = layer(torch.ones(2, 1, 4))
    output.sum().backward()
    assert output.device.type == "cpu"
    assert output.tolist() == [[[4.0] * 6]] * 2
    assert layer.weight.grad.tolist() == [[2.0] * 4] * (6 // world.tp.size)

    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            return torch.rand(3).tolist()

    outside = torch.get_rng_state()
    first = draw()
    assert draw() != first, "the tracker keeps its own state between forks"
    assert torch.equal(torch.get_rng_state(), outside), "and leaves the outer one alone"


def test_megatrons_own_layers_work_on_cpu(gang: Any) -> None:
    gang(2).run(layers_job, 2, 1)

"""Megatron-Core without CUDA: the one place that makes it run on CPU tensors over gloo.

Megatron-Core 0.16.1 names CUDA literally in many places (``device="cuda"``, ``torch.cuda.current_device()``,
``param.type() == "torch.cuda.FloatTensor"``). An import hook rewrites those names, and only those, while the vendor's
modules are loaded; nothing is copied and no file is changed. With CUDA present this module does nothing.

The hook is pinned: `VERIFIED_VERSION` is what it was tested with, and `missing_symbols` names what a newer release
broke.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

VERIFIED_VERSION = "0.16.1"
_PACKAGE = "megatron.core"
_NAMESPACE = "__megarl_cuda__"

# Symbols of Megatron-Core that this file or megarl/models relies on, with what we do with them.
RELIED_ON: dict[str, str] = {
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": "replaced: CPU generator state",
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state": "rewritten: CPU generator state",
    "megatron.core.tensor_parallel.random:CudaRNGStatesTracker": "rewritten",
    "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed": "called",
    "megatron.core.tensor_parallel.layers:set_tensor_model_parallel_attributes": "called",
    "megatron.core.parallel_state:initialize_model_parallel": "called",
    "megatron.core.process_groups_config:ProcessGroupCollection": "called",
    "megatron.core.packed_seq_params:PackedSeqParams": "subclassed",
    "megatron.core.models.gpt.gpt_model:GPTModel": "built",
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec": "called",
    "megatron.core.transformer.transformer_block:TransformerBlockSubmodules": "built",
    "megatron.core.transformer.spec_utils:ModuleSpec": "built",
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func": "called",
    "megatron.core.distributed:DistributedDataParallel": "built",
    "megatron.core.distributed:finalize_model_grads": "called",
    "megatron.core.optimizer:get_megatron_optimizer": "called",
    "megatron.core.optimizer.optimizer:ChainedOptimizer": "stepped by hand: grads, norm, clip, step",
    "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32": "called",
}


def install() -> None:
    """Install the hook when there is no CUDA. Must run before anything imports ``megatron.core``; idempotent."""
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise RuntimeError("megatron.core was imported before megarl.models.cpu.install()")
    version = importlib.metadata.version("megatron-core")
    if version != VERIFIED_VERSION:
        raise RuntimeError(
            f"megatron-core {version} is installed; CPU mode was verified with {VERIFIED_VERSION} only. "
            f"Missing there: {missing_symbols() or 'nothing that we know of'}"
        )
    sys.meta_path.insert(0, _Finder())
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    vars(random)["_set_cuda_rng_state"] = _set_rng_state


def missing_symbols() -> list[str]:
    """Which of `RELIED_ON` the installed Megatron-Core does not have (empty when all is well)."""
    missing = []
    for path in RELIED_ON:
        module, _, name = path.partition(":")
        try:
            found = hasattr(importlib.import_module(module), name)
        except ImportError:
            found = False
        if not found:
            missing.append(path)
    return missing


class _Rewrite(ast.NodeTransformer):
    """``torch.cuda`` -> our namespace, ``"cuda"`` -> ``"cpu"``, ``x.cuda()`` -> ``x.cpu()``, no pinned memory."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_NAMESPACE, ast.Load()), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value == "cuda":
                return ast.copy_location(ast.Constant("cpu"), node)
            if node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
                return ast.copy_location(ast.Constant(node.value.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            func = ast.copy_location(ast.Attribute(node.func.value, "cpu", ast.Load()), node.func)
            return ast.copy_location(ast.Call(func, [], []), node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def path_stats(self, path: Any) -> Any:  # noqa: ARG002
        raise OSError("rewritten modules are never read from or written to bytecode files")

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> types.CodeType:  # type: ignore[override]
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)[_NAMESPACE] = _CUDA
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:  # noqa: ARG001
    torch.set_rng_state(new_state)


class _Stream:
    """CPU work is never queued: streams and events have nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, _: Any = None) -> _Stream:
        return self

    def record(self, _: Any = None) -> None: ...

    def wait(self, _: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class _CudaNamespace:
    """What ``torch.cuda`` means inside Megatron-Core on a CPU. Anything else falls through to the real module."""

    Stream = Event = _Stream
    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor

    def __init__(self) -> None:
        self.random = types.SimpleNamespace(get_rng_state=self.get_rng_state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> str:
        return "cpu"

    def is_available(self) -> bool:
        return False

    def synchronize(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:  # noqa: ARG002
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG002
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


_CUDA = _CudaNamespace()

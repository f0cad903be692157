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
from collections.abc import Callable, Sequence
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
    "megatron.core.tensor_parallel.random:get_cuda_rng_tracker": "its states are saved and restored",
    "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed": "called",
    "megatron.core.tensor_parallel.layers:set_tensor_model_parallel_attributes": "called",
    "megatron.core.jit:jit_fuser": "replaced: nothing is compiled",
    "megatron.core.parallel_state:initialize_model_parallel": "called",
    "megatron.core.process_groups_config:ProcessGroupCollection": "called",
    "megatron.core.packed_seq_params:PackedSeqParams": "subclassed",
    "megatron.core.models.gpt.gpt_model:GPTModel": "built",
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec": "called",
    "megatron.core.transformer.transformer_block:TransformerBlockSubmodules": "changed: our norm, our attention",
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu": "replaced: CPU tensors to numbers, too",
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu": "replaced: the same",
    "megatron.core.tensor_parallel.mappings:_gather_along_first_dim": "wrapped: uneven ranks on gloo",
    "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim": "wrapped: uneven ranks on gloo",
    "megatron.core.tensor_parallel.mappings:copy_to_tensor_model_parallel_region": "called",
    "megatron.core.tensor_parallel.mappings:gather_from_sequence_parallel_region": "called",
    "megatron.core.optimizer.cpu_offloading:HybridDeviceOptimizer": "recognised; works on CUDA only",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer": "its shards are saved and restored",
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


def _patch_jit(module: Any) -> None:
    # torch.compile would import three seconds of compiler for fused kernels that a CPU does not use
    module.jit_fuser = lambda function: function


def _patch_random(module: Any) -> None:
    module._set_cuda_rng_state = _set_rng_state


def _patch_mappings(module: Any) -> None:
    module._gather_along_first_dim = _evenly(module._gather_along_first_dim, _gather_padded)
    module._reduce_scatter_along_first_dim = _evenly(module._reduce_scatter_along_first_dim, _reduce_scatter_padded)


def _patch_routing(module: Any) -> None:
    # Megatron looks at this name without Transformer Engine, too, and only then finds it undefined
    module.te_general_gemm = None
    _patch_dispatcher(module)


def _patch_dispatcher(module: Any) -> None:
    module.maybe_move_tensor_to_cpu = _to_host


# what is changed in a module right after it was imported
_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.jit": _patch_jit,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.tensor_parallel.mappings": _patch_mappings,
    "megatron.core.transformer.moe.moe_utils": _patch_routing,
    "megatron.core.transformer.moe.token_dispatcher": _patch_dispatcher,
}


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
        if module.__name__ in _PATCHES:
            _PATCHES[module.__name__](module)


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


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    """Megatron's own converts CUDA tensors only, and would hand tensors to collectives that want numbers."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _evenly(even: Callable[..., Any], padded: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of Megatron's that also takes ranks with different numbers of rows, which gloo's do not."""

    def collective(rows: torch.Tensor, group: Any, split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if split_sizes is None or group.size() == 1:
            return even(rows, group, None, use_global_buffer)
        sizes = [int(size) for size in split_sizes]
        return padded(even, rows, group, sizes)

    return collective


def _gather_padded(even: Callable[..., Any], rows: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    parts = even(_pad(rows, max(sizes)), group).chunk(len(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_padded(even: Callable[..., Any], rows: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    padded = torch.cat([_pad(part, max(sizes)) for part in torch.split(rows, sizes)])
    reduced: torch.Tensor = even(padded, group)
    return reduced[: sizes[group.rank()]]


def _pad(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - rows.size(0), *rows.shape[1:])])


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

"""Megatron's distributed optimizer, its learning-rate schedule, and the rule for non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megarl.models.decoder import Decoder
from megarl.models.pipeline import sum_gradients


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule over ``num_updates`` optimizer steps."""

    lr: float
    num_updates: int
    min_lr_ratio: float = 1.0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_updates: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = 1.0


def learning_rate(settings: OptimizerSettings, update: int) -> float:
    """The rate of optimizer step ``update`` (0-based): a linear warm-up that reaches ``lr``, then the schedule.

    A pure function, so that there is no schedule state to save. ``wsd`` holds ``lr`` for the first half of the run
    and goes down linearly in the second.
    """
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    lowest = settings.lr * settings.min_lr_ratio
    hold = settings.num_updates / 2 if settings.schedule == "wsd" else 0
    begin = max(hold, settings.warmup_updates)
    length = max(1.0, settings.num_updates - 1 - begin)
    progress = min(1.0, max(0.0, (update - begin) / length))
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "cosine":
        progress = 0.5 * (1 - math.cos(math.pi * progress))
    return settings.lr + (lowest - settings.lr) * progress


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer step did. ``grad_norm`` is global and before clipping; a non-finite one skips the step."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How gradients and optimizer steps are run; the results are the same."""

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    # moments and optimizer step on the host
    cpu_offload: bool = False
    # further fields of Megatron's OptimizerConfig and DistributedDataParallelConfig, as the user gave them
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements ``start`` to ``end`` of a parameter, which this rank updates."""

    chunk: int
    name: str
    start: int
    end: int
    # flat fp32: a view of the parameter itself, or the main copy of a bf16 one
    main: torch.Tensor
    # Adam's, empty before the first step
    state: dict[str, Any]


class Trainable:
    """A model with gradient buffers and an optimizer.

    Gradients live in one flat fp32 buffer per model chunk; parameters are views of another. Both keep their storage
    objects for life, so that `models.memory` can empty and refill them. Needs its layout to be active.
    """

    def __init__(self, model: Decoder, settings: OptimizerSettings, options: TrainingOptions) -> None:
        self.model = model
        config = model.chunks[0].config
        fields = {
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": options.overlap_grad_reduce,
            "overlap_param_gather": options.overlap_param_gather,
            "use_distributed_optimizer": True,
        }
        ddp_config = DistributedDataParallelConfig(**fields | dict(options.ddp))
        self.chunks = [
            # only the first chunk's gradients come late enough for buckets to be worth it
            DistributedDataParallel(config=config, ddp_config=ddp_config, module=module, disable_bucketing=i > 0)
            for i, module in enumerate(model.chunks)
        ]
        config.finalize_model_grads_func = sum_gradients
        no_sync = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._bf16 = config.bf16
        self._options = options
        self.settings = settings
        self.num_updates_done = 0
        self._optimizer = get_megatron_optimizer(self._config(), self.chunks, use_gloo_process_groups=False)
        self._configure_groups()

    def restart(self, settings: OptimizerSettings) -> None:
        """Begin a new stage of training: the weights stay, moments and schedule start afresh."""
        self.configure(settings)
        self.resume(0)

    def configure(self, settings: OptimizerSettings) -> None:
        """Go on with these settings."""
        self.settings = settings
        self._configure_groups()

    def zero_grad(self) -> None:
        """Empty the gradient buffers; before every optimizer step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> UpdateResult:
        """One optimizer step on the summed gradients. Collective.

        The norm is reduced over the whole world, so all ranks skip a non-finite step together and stay bit-identical.
        """
        lr = learning_rate(self.settings, self.num_updates_done)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return UpdateResult(norm, lr, skipped=True)
        if self.settings.grad_clip > 0:
            for inner in self._optimizer.chained_optimizers:
                # an optimizer on the host keeps its gradients elsewhere
                decoupled = inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(
                    inner.get_parameters(), self.settings.grad_clip, norm, use_decoupled_grad=decoupled
                )
        self._optimizer.step_with_ready_grads()
        self.num_updates_done += 1
        return UpdateResult(norm, lr, skipped=False)

    def finish_gathering(self) -> None:
        """Wait for weights that are still on their way from other ranks (overlap_param_gather). Collective."""
        if self._options.overlap_param_gather:
            self.gather_weights()

    def gather_weights(self) -> None:
        """Every rank's part of the updated weights, on every rank. Collective."""
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def refresh_main_weights(self) -> None:
        """After weights were written from outside: copy them into the optimizer's fp32 masters (bf16 only has them)."""
        self._optimizer.reload_model_params()
        for optimizer in self._torch_optimizers():
            if isinstance(optimizer, HybridDeviceOptimizer):
                # Megatron forgets the copies of fp32 weights
                for parameter, main in optimizer.param_to_inner_param.items():
                    main.data.copy_(parameter)

    def moments(self) -> list[dict[str, Any]]:
        """Adam's state dicts, one per parameter shard of this rank."""
        return [state for optimizer in self._working_optimizers() for state in optimizer.state.values()]

    def main_weights(self) -> list[torch.Tensor]:
        """The fp32 masters of bf16 weights. Shards of fp32 weights are not among them: they are the weights."""
        return [
            main
            for inner in self._optimizer.chained_optimizers
            if inner.optimizer is not None
            for group in inner.shard_fp32_from_float16_groups
            for main in group
            if main is not None  # a precision-aware optimizer keeps them itself
        ]

    def _config(self) -> OptimizerConfig:
        settings = self.settings
        fields = {
            "optimizer": "adam",
            "lr": settings.lr,
            "min_lr": settings.lr * settings.min_lr_ratio,
            "weight_decay": settings.weight_decay,
            "adam_beta1": settings.beta1,
            "adam_beta2": settings.beta2,
            "adam_eps": settings.eps,
            "clip_grad": settings.grad_clip,
            "bf16": self._bf16,
            "params_dtype": torch.bfloat16 if self._bf16 else torch.float32,
            "use_distributed_optimizer": True,
            "optimizer_cpu_offload": self._options.cpu_offload,
            "optimizer_offload_fraction": float(self._options.cpu_offload),
            # what Megatron's host optimizer is built upon
            "use_precision_aware_optimizer": self._options.cpu_offload,
        }
        return OptimizerConfig(**fields | dict(self._options.optimizer))

    def _configure_groups(self) -> None:
        """AdamW's settings, group by group.

        Megatron gives norms and biases a group of their own with ``wd_mult`` 0, which only its scheduler would heed.
        torch's own AdamW (used where neither TE nor Apex is installed) has a fused kernel on every platform.
        """
        settings = self.settings
        for optimizer in self._torch_optimizers():
            for group in optimizer.param_groups:
                group.update(betas=(settings.beta1, settings.beta2), eps=settings.eps)
                group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
                if type(optimizer) is torch.optim.AdamW:
                    group["fused"] = True

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of the parameters that it updates, in a fixed order."""
        for inner in self._optimizer.chained_optimizers:
            if inner.optimizer is None:
                continue
            for chunk_index, chunk in enumerate(self.model.chunks):
                for name, parameter in chunk.named_parameters():
                    if parameter not in inner.model_param_group_index_map:
                        continue
                    group, position = inner.model_param_group_index_map[parameter]
                    main, state = _updated(inner.optimizer, inner.optimizer.param_groups[group]["params"][position])
                    part = inner._get_model_param_range_map(parameter)["param"]
                    yield Shard(chunk_index, name, part.start, part.end, main, state)

    @torch.no_grad()
    def resume(self, num_updates_done: int) -> None:
        """Make room for the moments of a run that has made so many optimizer steps; their contents come later."""
        self.num_updates_done = num_updates_done
        for shard in self.shards():
            shard.state.clear()
            if num_updates_done:
                shard.state["exp_avg"] = torch.zeros_like(shard.main)
                shard.state["exp_avg_sq"] = torch.zeros_like(shard.main)
        for optimizer in self._working_optimizers():
            if isinstance(optimizer, torch.optim.AdamW):
                # one counter for each: torch advances them one by one, so a shared one would run away
                for state in optimizer.state.values():
                    if state:
                        state["step"] = torch.tensor(float(num_updates_done))
            else:
                for group in optimizer.param_groups:
                    group["step"] = num_updates_done

    @torch.no_grad()
    def publish_main_weights(self) -> None:
        """After the main weights were written from outside: round them to the model's, on every rank. Collective."""
        for inner in self._optimizer.chained_optimizers:
            if isinstance(inner.optimizer, HybridDeviceOptimizer):
                for parameter, main in inner.optimizer.param_to_inner_param.items():
                    parameter.copy_(main)
            elif inner.optimizer is not None:
                inner._copy_main_params_to_model_params()
        self.gather_weights()

    def _working_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that hold the moments: Megatron's host optimizer leaves its work to others."""
        found: list[torch.optim.Optimizer] = []
        for optimizer in self._torch_optimizers():
            found += optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]
        return found

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [inner.optimizer for inner in self._optimizer.chained_optimizers if inner.optimizer is not None]


def _updated(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """What is really updated in the place of ``parameter``, and its state."""
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return parameter, optimizer.state[parameter]
    main = optimizer.param_to_inner_param[parameter]
    owner = next(
        working
        for working in optimizer.sub_optimizers
        if any(main is each for group in working.param_groups for each in group["params"])
    )
    return main, owner.state[main]

"""Megatron's distributed optimizer, its learning-rate schedule, and the rule for non-finite gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

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


class Trainable:
    """A model with gradient buffers and an optimizer.

    Gradients live in one flat fp32 buffer per model; parameters are views of another. Both keep their storage objects
    for life, so that `models.memory` can empty and refill them.
    """

    def __init__(self, module: GPTModel, settings: OptimizerSettings) -> None:
        self.ddp = DistributedDataParallel(
            config=module.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
            ),
            module=module,
        )
        module.config.finalize_model_grads_func = sum_gradients
        module.config.no_sync_func = self.ddp.no_sync
        self._bf16 = module.config.bf16
        self.settings = settings
        self.num_updates_done = 0
        self._optimizer = get_megatron_optimizer(self._config(), [self.ddp], use_gloo_process_groups=False)
        self._configure_groups()

    def restart(self, settings: OptimizerSettings) -> None:
        """Begin a new stage of training: the weights stay, moments and schedule start afresh."""
        self.settings = settings
        self.num_updates_done = 0
        self._configure_groups()
        for state in self.moments():
            state.clear()

    def zero_grad(self) -> None:
        """Empty the gradient buffers; before every optimizer step."""
        self.ddp.zero_grad_buffer()
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
            clip_grad_by_total_norm_fp32(self._optimizer.get_parameters(), self.settings.grad_clip, norm)
        self._optimizer.step_with_ready_grads()
        self.num_updates_done += 1
        return UpdateResult(norm, lr, skipped=False)

    def refresh_main_weights(self) -> None:
        """After weights were written from outside: copy them into the optimizer's fp32 masters (bf16 only has them)."""
        self._optimizer.reload_model_params()

    def moments(self) -> list[dict[str, Any]]:
        """Adam's state dicts, one per parameter shard of this rank."""
        return [state for optimizer in self._torch_optimizers() for state in optimizer.state.values()]

    def main_weights(self) -> list[torch.Tensor]:
        """The fp32 masters of bf16 weights; empty in fp32, where the shards are views of the weights themselves."""
        if not self._bf16:
            return []
        return [param for group in self._torch_param_groups() for param in group["params"]]

    def _config(self) -> OptimizerConfig:
        settings = self.settings
        return OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr * settings.min_lr_ratio,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.grad_clip,
            bf16=self._bf16,
            params_dtype=torch.bfloat16 if self._bf16 else torch.float32,
            use_distributed_optimizer=True,
        )

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

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [inner.optimizer for inner in self._optimizer.chained_optimizers if inner.optimizer is not None]

    def _torch_param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._torch_optimizers() for group in optimizer.param_groups]

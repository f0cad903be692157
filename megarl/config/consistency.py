"""Settings that are fine one by one and contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import catalogue
from megarl.config.alert_checks import check_alerts
from megarl.config.algorithms import GrpoSettings, PpoSettings, SftSettings
from megarl.config.chat import RESERVED_OPTIONS
from megarl.config.converse_checks import check_converse_settings
from megarl.config.filter_checks import check_filters
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.reward_checks import check_rewards
from megarl.config.roles import TrainedSettings
from megarl.config.schema import OptimizerSettings, RunConfig
from megarl.config.serving_checks import check_serving

_GROUP_SIZE: KeyPath = ("rollout", "group_size")


def check_consistency(config: RunConfig) -> list[Problem]:
    """Every contradiction in the configuration."""
    return [
        *_model(config),
        *_chat(config),
        *_rollout(config),
        *check_filters(config),
        *check_serving(config),
        *check_converse_settings(config),
        *_schedules(config),
        *_optimizers(config),
        *check_rewards(config),
        *_reward_model(config),
        *_eval(config),
        *_checkpoint(config),
        *check_alerts(config),
    ]


def _contradiction(text: str, hint: str, *keys: KeyPath) -> Problem:
    return Problem("MRL-1005", text, keys, (hint,))


def _model(config: RunConfig) -> Iterator[Problem]:
    path, own, tokenizer = ("model", "path"), ("model", "config"), ("model", "tokenizer")
    if config.model.path is not None and config.model.config is not None:
        yield _contradiction(
            "model.path and model.config are both given.",
            "Keep model.path to load weights, or model.config to start from random ones; set the other to null.",
            own,
            path,
        )
    if config.model.path is None and config.model.config is None:
        yield Problem(
            "MRL-1002",
            "model.path or model.config is required but neither is given.",
            (("model",), path, own),
            ("Give model.path (a local Hugging Face directory) or model.config (to start from random weights).",),
        )
    elif config.model.path is None and config.model.tokenizer is None:
        yield Problem(
            "MRL-1002",
            "model.tokenizer is required where there is no model.path to take it from.",
            (own, tokenizer),
            ("Write model.tokenizer: builtin:characters, or a directory with tokenizer.json.",),
        )


def _chat(config: RunConfig) -> Iterator[Problem]:
    for name in RESERVED_OPTIONS:
        if name in config.chat.options:
            path = ("chat", "options", name)
            yield Problem("MRL-1012", f"{dotted(path)} is given to the template by megarl itself.", (path,))


def _rollout(config: RunConfig) -> Iterator[Problem]:
    is_sft = isinstance(config.algorithm, SftSettings)
    if config.rollout is None:
        needs = "" if is_sft and not config.eval_sets else ("eval.sets" if is_sft else "The algorithm")
        if needs:
            yield Problem(
                "MRL-1002",
                "rollout is required but not given.",
                (("rollout",), ("algorithm",), ("eval", "sets")),
                (f"{needs} generates samples. Write at least rollout: {{max_new_tokens: ...}}",),
            )
    elif isinstance(config.algorithm, GrpoSettings) and config.rollout.group_size < 2:
        yield _contradiction(
            f"rollout.group_size={config.rollout.group_size} is too small for grpo: "
            "a sample's advantage is its reward minus its group's mean, which is 0 in a group of one.",
            "Set rollout.group_size to 2 or more (8 is usual), or use ppo.",
            _GROUP_SIZE,
            ("algorithm", "name"),
        )


def _all_optimizers(config: RunConfig) -> list[tuple[KeyPath, OptimizerSettings]]:
    optimizers: list[tuple[KeyPath, OptimizerSettings]] = [(("actor", "optimizer"), config.actor.optimizer)]
    if config.uses_critic:
        optimizers.append((("critic", "optimizer"), config.critic.optimizer))
    if config.warmup is not None:
        optimizers.append((("warmup", "optimizer"), config.warmup.optimizer))
    return optimizers


def _optimizers(config: RunConfig) -> Iterator[Problem]:
    for path, optimizer in _all_optimizers(config):
        if optimizer.cpu_offload and config.run.device == "cpu":
            yield _contradiction(
                f"{dotted(path)}.cpu_offload=true has nowhere to go: run.device=cpu, the optimizer is on the host.",
                f"Set {dotted(path)}.cpu_offload: false",
                (*path, "cpu_offload"),
                ("run", "device"),
            )
    trained: tuple[tuple[str, TrainedSettings], ...] = (("actor", config.actor), ("critic", config.critic))
    for name, role in trained:
        if role.overlap_param_gather and not role.overlap_grad_reduce:
            yield _contradiction(
                f"{name}.overlap_param_gather=true needs {name}.overlap_grad_reduce=true.",
                f"Set {name}.overlap_grad_reduce: true, or {name}.overlap_param_gather: false",
                (name, "overlap_param_gather"),
                (name, "overlap_grad_reduce"),
            )


def _schedules(config: RunConfig) -> Iterator[Problem]:
    for path, optimizer in _all_optimizers(config):
        if optimizer.schedule != "constant" and optimizer.min_lr_ratio == 1:
            yield _contradiction(
                f"{dotted(path)}.schedule={optimizer.schedule} with min_lr_ratio=1 never lowers lr.",
                f"Set {dotted(path)}.min_lr_ratio below 1 (0.1 is usual), or schedule: constant.",
                (*path, "schedule"),
                (*path, "min_lr_ratio"),
            )
    if isinstance(config.algorithm, PpoSettings) and config.algorithm.critic_warmup_steps >= config.run.num_steps:
        yield _contradiction(
            f"algorithm.critic_warmup_steps={config.algorithm.critic_warmup_steps} leaves the actor nothing: "
            f"run.num_steps={config.run.num_steps}.",
            f"Use at most {config.run.num_steps - 1}.",
            ("algorithm", "critic_warmup_steps"),
            ("run", "num_steps"),
        )


def _reward_model(config: RunConfig) -> Iterator[Problem]:
    if config.uses_reward_model and config.reward_model.path is None:
        yield Problem(
            "MRL-1002",
            "reward_model.path is required where a reward is `model`.",
            (("reward_model", "path"), ("reward",), ("eval", "sets")),
            ("Write reward_model: {path: DIRECTORY}, a local Hugging Face sequence-classification model.",),
        )


def _eval(config: RunConfig) -> Iterator[Problem]:
    if config.eval.every > 0 and not config.eval.sets:
        yield _contradiction(
            f"eval.every={config.eval.every} has nothing to evaluate: eval.sets is empty.",
            "Write eval.sets: {held_out: {data: ...}}, or eval.every: 0",
            ("eval", "every"),
            ("eval", "sets"),
        )
    for kind, name, one in config.eval_sets:
        path = ("eval", "sets" if kind == "eval" else "bench_sets", name)
        if one.num_samples > 1 and one.temperature == 0:
            yield _contradiction(
                f"{dotted((*path, 'num_samples'))}={one.num_samples} at temperature 0 would draw the same sample "
                f"{one.num_samples} times.",
                "Set its temperature above 0 (1.0 is usual), or num_samples: 1",
                (*path, "num_samples"),
                (*path, "temperature"),
            )


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    """A checkpoint can only be the best by a metric that some evaluation gives."""
    name = config.checkpoint.best_metric
    path = ("checkpoint", "best_metric")
    if name is None:
        return
    if not config.eval.sets:
        yield _contradiction(
            f"{dotted(path)}={show(name)} is never measured: eval.sets is empty.",
            "Write eval.sets: {held_out: {data: ...}} and eval.every, or checkpoint.best_metric: null",
            path,
            ("eval", "sets"),
        )
        return
    known = [metric for one, settings in config.eval.sets.items() for metric in _metrics(one, settings.num_samples)]
    known += [f"val/score/{statistic}" for statistic in ("mean", "max", "min")]
    if name not in known:
        close = catalogue.closest(name, known)
        meant = f" Did you mean {close}?" if close else ""
        yield _contradiction(
            f"{dotted(path)}={show(name)} is not a metric of an evaluation of this run.{meant}",
            f"Its metrics are: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}.",
            path,
            ("eval", "sets"),
        )
    elif config.eval.every == 0:
        yield _contradiction(
            f"{dotted(path)}={show(name)} is not measured between the first and the last step: eval.every=0.",
            "Set eval.every to a multiple of checkpoint.every",
            path,
            ("eval", "every"),
        )


def _metrics(eval_set: str, num_samples: int) -> list[str]:
    """What an evaluation reports: the mean (by veRL's name, too), and for several samples their spread and extremes."""
    names = [f"mean@{num_samples}"]
    if num_samples > 1:
        names.append(f"std@{num_samples}")
        sizes = sorted({2**power for power in range(1, num_samples.bit_length())} | {num_samples})
        names += [f"{extreme}@{size}" for size in sizes for extreme in ("best", "worst")]
    return [*(f"eval/{eval_set}/score/{name}" for name in names), f"val/test_score/{eval_set}"]

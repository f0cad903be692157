"""The health rules as data: what each one watches, when it speaks, what it means and what to do about it.

Pure data, so that the settings can be checked without importing anything that measures. `megarl.metrics.health` holds
the conditions as code, and ``docs/health.md`` is written from this file by ``tools/health_reference.py``.

* ``warmup``: steps with the rule's metrics before it may speak, counted anew in every stage of a run.
* ``patience``: steps in a row that must meet the condition.
* ``cooldown``: steps between two alerts of the rule, unless it gets worse.
* ``thresholds``: numbers that a configuration may change. ``info``, ``warn`` and ``critical`` are where a severity
  begins; the other names are explained by the condition, which quotes all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HealthRule:
    """One rule. ``metrics`` are canonical names, separated by spaces, with ``*`` for a part that varies."""

    id: str
    metrics: str
    condition: str
    severity: str
    meaning: str
    advice: str
    thresholds: Mapping[str, float] = field(default_factory=dict)
    warmup: int = 0
    patience: int = 1
    cooldown: int = 50

    @property
    def may_stop_a_run(self) -> bool:
        """Whether it can be more than information."""
        return self.severity != "info"


_RULES: tuple[HealthRule, ...] = (
    # -- does it learn?
    HealthRule(
        "H01", "critic/score/mean", "the least-squares slope over the last 100 steps is not above 0", "info",
        "the score has not improved for 100 steps",
        "Read some responses; try prompts of middling difficulty (data.train), a larger rollout.group_size or another "
        "actor.optimizer.lr.",
        cooldown=100,
    ),
    HealthRule(
        "H02", "critic/score/mean critic/score/max", "both are 0", "warn", "every sample scores 0",
        "Check the reward function (reward.name, reward.options), the answer's format and the prompts "
        "(data.prompt_key, data.answer_key).",
        patience=10,
    ),
    HealthRule(
        "H03", "actor/entropy",
        "outside {low} to {high}: info; below {warn} of the median of the first 10 steps: warn; below {critical}: "
        "critical. Warn and critical only if that median is above {critical}: who starts lower has not collapsed",
        "info, warn or critical", "entropy collapse, the policy settles too early",
        "Raise algorithm.entropy_coef or rollout.temperature, or lower actor.optimizer.lr.",
        {"low": 0.4, "high": 0.6, "warn": 0.25, "critical": 0.05}, warmup=10, patience=3, cooldown=200,
    ),
    HealthRule(
        "H04", "actor/entropy", "above {warn} times the median of the first 10 steps", "warn",
        "entropy is exploding, answers become random",
        "Lower algorithm.entropy_coef, rollout.temperature or actor.optimizer.lr.",
        {"warn": 2.0}, warmup=10, patience=3,
    ),
    HealthRule(
        "H05", "actor/ppo_kl", "the absolute value is above {warn}: warn; above {critical}: critical. Exactly 0 (one "
        "update per step) is not looked at", "warn or critical",
        "the policy moves far from the rollout policy in one step",
        "Lower actor.optimizer.lr, algorithm.num_epochs or algorithm.num_minibatches.",
        {"warn": 0.02, "critical": 0.1}, patience=2,
    ),
    HealthRule(
        "H06", "actor/kl_loss", "above {warn} times its median over steps 5 to 20 (if that is above 0), or higher than "
        "the step before in 50 steps in a row", "warn", "the policy drifts away from the reference model",
        "Raise algorithm.kl.coef or lower actor.optimizer.lr.",
        {"warn": 10.0}, warmup=20, patience=5,
    ),
    HealthRule(
        "H07", "actor/kl_loss actor/pg_clipfrac critic/score/mean", "kl_loss is below {kl} and pg_clipfrac below "
        "{clipfrac}, and the score does not improve (slope over 50 steps above 0 with p < 0.05)", "info",
        "updates are very small, the learning rate may be too low", "Raise actor.optimizer.lr.",
        {"kl": 1e-4, "clipfrac": 0.002}, patience=50, cooldown=200,
    ),
    HealthRule(
        "H08", "actor/pg_clipfrac", "above {warn}", "warn", "many tokens are outside the trust region",
        "Lower actor.optimizer.lr, algorithm.num_minibatches or algorithm.num_epochs, or widen algorithm.clip_high.",
        {"warn": 0.2}, patience=5,
    ),
    HealthRule(
        "H09", "actor/grad_norm critic/grad_norm actor/skipped_updates critic/skipped_updates",
        "not finite, or an update was skipped because it was not, or above {floor} and above {critical} times the "
        "median of the last 20 steps (at least 10)", "critical", "a gradient spike",
        "Lower the optimizer.lr of that model, keep its optimizer.grad_clip on, and look at the step's samples.",
        {"critical": 10.0, "floor": 0.1},
    ),
    HealthRule(
        "H10", "critic/returns/mean critic/values/mean critic/value_errors/var critic/vf_explained_var",
        "with a critic: the mean raw advantage (returns - values) is further than {warn} standard deviations from 0, "
        "or the explained variance is below {explained}", "warn", "the value model does not track returns",
        "Raise critic.optimizer.lr or algorithm.critic_warmup_steps.",
        {"warn": 0.5, "explained": 0.0}, patience=20,
    ),
    # -- is it as fast as it was?
    HealthRule(
        "H11", "timing_s/step timing_s/*", "the median of the last 10 steps is above {warn} times that of steps 5 to "
        "15, or the robust slope over 50 steps is above {slope} of their median per step; less than {floor} seconds "
        "more than early do not count", "warn",
        "steps are getting slower",
        "If response_length/mean grew, lower rollout.max_new_tokens; else look for other programs on the machines.",
        {"warn": 1.3, "slope": 0.005, "floor": 0.1}, warmup=25, patience=10, cooldown=100,
    ),
    HealthRule(
        "H12", "timing_s/* timing_s/step", "one phase takes more than {info} of the step, in steps that generate",
        "info", "one phase dominates the step",
        "Make it faster first: generation.num_slots for gen, actor.max_tokens_per_microbatch (critic, reference) for "
        "passes of the models, reward.name for reward.",
        {"info": 0.5}, warmup=10, patience=10, cooldown=500,
    ),
    # -- will it survive?
    HealthRule(
        "H13", "memory/*/end/onload/max_reserved_frac/* perf/allocator_retries",
        "a device is fuller than {warn}: warn; than {critical}: critical; or the allocator had to retry: warn",
        "warn or critical", "device memory is close to its capacity",
        "Lower actor.max_tokens_per_microbatch or generation.num_slots, set actor.recompute to selective or full, or "
        "actor.offload to true.",
        {"warn": 0.92, "critical": 0.97},
    ),
    HealthRule(
        "H14", "*", "any metric is NaN or infinite", "critical", "the numbers went bad",
        "Lower actor.optimizer.lr and check what reward.name returns; alerts.fatal: [H14] stops a run here.",
        cooldown=10,
    ),
    # -- are the samples any good?
    HealthRule(
        "H15", "response_length/clip_ratio", "above {warn}; or above {floor} and above {growth} times the mean of the "
        "first 10 steps", "warn", "responses hit the length limit",
        "Raise rollout.max_new_tokens, or let reward.name prefer shorter answers.",
        {"warn": 0.1, "growth": 2.0, "floor": 0.02}, patience=5,
    ),
    HealthRule(
        "H16", "response/aborted_ratio", "above {info}: info; above {warn}: warn", "info or warn",
        "generations were aborted or empty",
        "See that prompts fit rollout.max_prompt_tokens and leave room for rollout.max_new_tokens.",
        {"info": 0.0, "warn": 0.05},
    ),
    HealthRule(
        "H17", "critic/reward_clip_frac", "above {warn}", "warn", "too many rewards are clipped",
        "Change the range of what reward.name returns, or raise algorithm.reward_clip.",
        {"warn": 0.2}, patience=5,
    ),
    HealthRule(
        "H18", "actor/valid_sample_ratio", "below {warn}", "warn", "most samples are filtered out",
        "Loosen the filter, or take prompts of middling difficulty (data.train).",
        {"warn": 0.5}, patience=5,
    ),
    HealthRule(
        "H19", "actor/ratio_max", "above {warn}", "warn", "extreme importance ratios",
        "If mismatch/logprob_gap_max is large too, trainer and engine disagree: try model.dtype: fp32. Else lower "
        "actor.optimizer.lr or algorithm.num_minibatches.",
        {"warn": 10.0}, patience=3,
    ),
    HealthRule(
        "H20", "critic/score/max critic/score/min", "they are equal, in runs that compare the samples of a group",
        "warn", "no reward variance, so advantages vanish",
        "Take prompts of middling difficulty (data.train), a finer reward (reward.name), or a larger "
        "rollout.group_size.",
        patience=5,
    ),
    HealthRule(
        "H21", "eval/*/score/mean@*", "further than {warn} standard errors (eval/*/score/stderr@*) and than {floor} "
        "below its best",
        "warn", "the evaluation regressed",
        "Go back to the best checkpoint (checkpoint.best_metric keeps it); lower actor.optimizer.lr or raise "
        "algorithm.kl.coef.",
        {"warn": 3.0, "floor": 0.02},
    ),
    HealthRule(
        "H22", "perf/mfu/actor perf/throughput", "below {warn} of the median of steps 5 to 15", "warn",
        "training efficiency dropped",
        "Look for other programs on the machines and at time/*/skew; if sequences got shorter, raise "
        "actor.max_tokens_per_microbatch.",
        {"warn": 0.7}, warmup=15, patience=10, cooldown=100,
    ),
    HealthRule(
        "H23", "time/*/onload time/*/offload time/*/total", "onload and offload together take more than {info} of a "
        "phase of at least {min_seconds} seconds", "info", "moving states dominates the phase",
        "Set actor.offload (critic.offload, reference.offload) to false if memory allows.",
        {"info": 0.3, "min_seconds": 0.1}, patience=5, cooldown=500,
    ),
    HealthRule(
        "H24", "training/global_step sample/model_version/mean", "their difference is above {warn} + "
        "rollout.max_staleness (a fresh sample is 1 behind)", "warn", "training on stale samples",
        "Look at weights/version: the engines did not get the newest weights (weights.transport), or samples wait "
        "longer than rollout.max_staleness allows.",
        {"warn": 1.0}, patience=3,
    ),
    HealthRule(
        "H25", "memory/cpu/*/end/rss perf/cpu_memory_used_frac",
        "a process grows by more than {warn} GiB per 100 steps over 200 steps, or a host is fuller than {host}",
        "warn", "host memory is running out",
        "Look for what keeps growing, often a reward function (reward.name); until then checkpoint.every saves the "
        "run. To use less, lower generation.num_slots.",
        {"warn": 0.5, "host": 0.9}, patience=10, cooldown=100,
    ),
    HealthRule(
        "H26", "memory/*/end/offload/allocated/* memory/*/end/onload/allocated/*",
        "more than {warn} GiB are still on a device after a phase that took at least {moved} of what it held off it; "
        "only on CUDA", "warn", "states were left on the device",
        "See that actor.offload, critic.offload and reference.offload are true; a plugin may hold tensors.",
        {"warn": 1.0, "moved": 0.05}, patience=3, cooldown=200,
    ),
    # -- do engine and trainer agree?
    HealthRule(
        "H27", "mismatch/newest_logprob_gap_mean sample/staleness/min mismatch/engine/*/root_gap_mean "
        "mismatch/engine/*/num_tokens mismatch/logprob_gap_first_quarter mismatch/logprob_gap_last_quarter",
        "the gap is above {warn}: warn; above {critical}: critical; or above {floor} and above {growth} times the "
        "median of the last 20 fine steps (at least 5): warn; looked at only with sample/staleness/min 0. Or one "
        "server's root_gap_mean, squared, is above {floor} and above {server} · (1 + 300 / its tokens + 300 / those of "
        "all others) times the squared median of the others: warn. The message says what the pattern points to: one "
        "server; a jump (stale weights after a push); a last quarter above {along} times the first (KV cache or rope); "
        "a sparse model (routing); from the first step (template, temperature or dtype)", "warn or critical",
        "engine and trainer drift apart while the policy changes, so that updates are more and more off-policy",
        "Give both the same model.dtype, set algorithm.correction.kind to truncate or mask, or lower "
        "actor.optimizer.lr.",
        {"warn": 0.05, "critical": 0.5, "floor": 1e-4, "growth": 10.0, "server": 3.0, "along": 3.0},
    ),
)  # fmt: skip

HEALTH_RULES: Mapping[str, HealthRule] = {rule.id: rule for rule in _RULES}

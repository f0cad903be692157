"""Every metric of megarl, one entry each: canonical name, reduction, unit, formula and other names.

To add a metric, add an entry and run ``python tools/metrics_reference.py``, which rewrites docs/metrics.md.

* ``{mean,max,min}`` in several fields expands in parallel: first with first, second with second.
* ``{task}``, ``{infix}``, ``{k}``, ``{rule}`` are filled in by the run. An infix is ``cluster/phase``, for example
  ``actor_train/train_step``.
* The reduction is a kind of `metrics.values`, or ``derived``: computed once by the driver from other values.
* Aliases are spellings of the same value in the dialect of ROLL, veRL or Trinity-RFT; see `trackers.views`.

Formulas: TM is the mean over tokens that the policy sampled (``loss_mask`` 1), SM the mean over sequences of each one's
TM; d = log π_θ - log π_old and r = exp(d), both of a sampled token during the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COUNT_UNITS = {"steps", "epochs", "updates", "samples", "tokens", "bytes", "version", "level"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the table."""

    name: str
    reduction: str
    unit: str
    doc: str
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether values are whole numbers and are written as such."""
        return self.unit in COUNT_UNITS and self.reduction != "mean"


CATALOGUE: tuple[Metric, ...] = (
    # -- progress
    Metric("training/global_step", "last", "steps", "Training steps made, this one included; 0 before the first."),
    Metric("training/epoch", "last", "epochs", "Whole passes over the prompts made before this step."),
    Metric("system/samples", "last", "samples", "Samples trained on since the run began, over all restarts."),
    Metric("system/tps", "derived", "tokens/s",
           "Tokens / timing_s/step_wall, both summed over the last 5 steps; all devices."),
    # -- scores, rewards and advantages
    Metric("critic/score/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over samples of what the reward function gave, empty responses included."),
    Metric("critic/rewards/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over samples of the summed token rewards after KL penalty and shaping, unwhitened."),
    Metric("critic/advantages/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over sampled tokens of the advantage that the loss uses; whitened ones average 0."),
    Metric("critic/returns/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over sampled tokens of the return; equal to the advantage without a critic."),
    Metric("critic/returns/var", "moments", "reward²", "Population variance of the return over sampled tokens."),
    Metric("critic/values/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over sampled tokens of the critic's value before the update."),
    Metric("critic/value_errors/var", "moments", "reward²",
           "Population variance over sampled tokens of return - value before the update."),
    Metric("critic/old_log_prob/mean", "mean", "nats/token", "TM(log π_old), by the trainer, before the update."),
    Metric("critic/ref_log_prob/mean", "mean", "nats/token", "TM(log π_ref); absent without a reference model."),
    # -- the critic's update
    Metric("critic/vf_loss", "loss", "reward²",
           "½·max((V_θ-R)², (V_clipped-R)²), aggregated as the loss is; averaged over optimizer steps.",
           {"roll": "critic/loss"}),
    Metric("critic/vf_clipfrac", "mean", "fraction",
           "TM(1[(V_clipped-R)² > (V_θ-R)²]); 0 when value clipping is off.", {"roll": "critic/clipfrac"}),
    Metric("critic/vpred_mean", "mean", "reward", "TM(V_θ) during the update.", {"roll": "critic/vpred"}),
    Metric("critic/error", "mean", "reward²", "TM((V_θ-R)²); twice critic/vf_loss when neither clips nor reweights."),
    Metric("critic/vf_explained_var", "derived", "1",
           "1 - Var(R-V)/(Var(R)+1e-5): 1 is a perfect critic, 0 a constant one."),
    Metric("critic/lr", "last", "1", "Learning rate that the last optimizer step of the critic used."),
    Metric("critic/grad_norm", "mean", "1",
           "Global L2 norm of the critic's gradient before clipping; mean over optimizer steps."),
    Metric("critic/grad_norm_max", "max", "1", "The largest critic gradient norm of the step's optimizer steps."),
    Metric("critic/skipped_updates", "sum", "updates",
           "Optimizer steps of the critic that were skipped (bad gradient)."),
    # -- the policy's update
    Metric("actor/pg_loss", "loss", "1", "The policy-gradient part of the loss; averaged over optimizer steps."),
    Metric("actor/kl_loss", "loss", "nats/token",
           "The configured estimator of KL(π_θ‖π_ref), without its coefficient; absent without a reference model."),
    Metric("actor/kl_coef", "last", "1", "The coefficient that the last optimizer step multiplied actor/kl_loss with."),
    Metric("actor/total_loss", "loss", "1",
           "What is back-propagated: all terms with coefficients, before loss scaling; averaged over optimizer steps."),
    Metric("actor/entropy", "mean", "nats/token",
           "TM of the whole-vocabulary entropy at the sampling temperature, before the update.",
           {"roll": "critic/entropy/mean"}),
    Metric("actor/entropy_update", "mean", "nats/token", "As actor/entropy, but during the update."),
    Metric("actor/pg_clipfrac", "mean", "fraction",
           "TM(1[clip(r)·A < r·A]): tokens whose objective the clip changes.", {"roll": "actor/clipfrac"}),
    Metric("actor/pg_clipfrac_lower", "mean", "fraction",
           "TM(1[A<0 and r above the dual-clip bound]); absent when dual clip is off."),
    Metric("actor/ppo_kl", "mean", "nats/token",
           "TM(-d), an estimate of KL(π_old‖π_θ); 0 on a single on-policy update.", {"roll": "actor/policykl"}),
    Metric("actor/approxkl", "mean", "nats/token", "TM(½·d²)."),
    Metric("actor/ratio_mean", "mean", "1", "SM(r), over sequences with at least one sampled token."),
    Metric("actor/ratio_{max,min}", "{max,min}", "1", "The {largest,smallest} r of a sampled token."),
    Metric("actor/ppo_ratio_clipfrac", "mean", "fraction", "TM(1[r outside the clip range]); the sum of the next two."),
    Metric("actor/ppo_ratio_high_clipfrac", "mean", "fraction", "TM(1[r > 1+ε_high])."),
    Metric("actor/ppo_ratio_low_clipfrac", "mean", "fraction", "TM(1[r < 1-ε_low])."),
    Metric("actor/sft_loss", "loss", "nats/token", "-log π_θ of the demonstrations, aggregated as the loss is."),
    Metric("actor/lr", "last", "1", "Learning rate that the last optimizer step of the policy used."),
    Metric("actor/grad_norm", "mean", "1",
           "Global L2 norm of the policy's gradient before clipping; mean over optimizer steps."),
    Metric("actor/grad_norm_max", "max", "1", "The largest policy gradient norm of the step's optimizer steps."),
    Metric("actor/skipped_updates", "sum", "updates",
           "Optimizer steps of the policy that were skipped (bad gradient)."),
    # -- engine against trainer
    Metric("mismatch/logprob_gap_mean", "mean", "nats/token", "TM(|log π_old by the trainer - log π by the engine|)."),
    Metric("mismatch/logprob_gap_max", "max", "nats/token", "The largest such gap of a sampled token."),
    Metric("mismatch/k3_kl", "mean", "nats/token",
           "TM(exp(g)-g-1), g = log π_old by the trainer - log π by the engine: KL(engine‖trainer)."),
    # -- lengths and completion
    Metric("response_length/{mean,max,min}", "{mean,max,min}", "tokens",
           "The {mean,max,min} over samples of the response's tokens.",
           {"roll": "tokens/response_length/{mean,max,min}"}),
    Metric("response_length/clip_ratio", "mean", "fraction", "Share of samples that the length limit ended."),
    Metric("response/aborted_ratio", "mean", "fraction",
           "Share of samples with an empty response or aborted by the engine."),
    Metric("prompt_length/{mean,max,min}", "{mean,max,min}", "tokens",
           "The {mean,max,min} over samples of the prompt's tokens.",
           {"roll": "tokens/prompt_length/{mean,max,min}"}),
    # -- groups
    Metric("experience_pipeline/experience_count", "sum", "samples", "Samples left for training after all filters."),
    Metric("experience_pipeline/group_advantages/reward_mean/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over groups of the group's mean reward."),
    Metric("experience_pipeline/group_advantages/reward_std/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over groups of the sample standard deviation (n-1) of the group's rewards."),
    Metric("rollout/{score}/{mean,max,min}", "{mean,max,min}", "score",
           "The {mean,max,min} over prompts of the prompt's mean of a named score that the reward function gave."),
    Metric("rollout/zero_variance_group_ratio", "mean", "fraction",
           "Share of groups whose rewards are all equal: no advantage."),
    # -- evaluation
    Metric("eval/{task}/score/mean@{k}", "derived", "reward",
           "Mean score of the k attempts at a prompt, then the mean over prompts; a failed attempt scores 0.",
           {"verl": "val/test_score/{task}"}),
    Metric("eval/{task}/score/std@{k}", "derived", "reward",
           "Population standard deviation of a prompt's k scores, then the mean over prompts; absent for k = 1."),
    Metric("eval/{task}/score/{best,worst}@{k}", "derived", "reward",
           "Expected {best,worst} of k attempts drawn without replacement from those made; the mean over prompts."),
    Metric("val/score/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over all evaluation samples of all tasks."),
    # -- weights
    Metric("weights/version", "last", "version", "The version that the engines serve after the step."),
    Metric("weights/push_bytes", "sum", "bytes", "Bytes of weights sent to the engines."),
    # -- speed and memory
    Metric("perf/total_num_tokens", "sum", "tokens", "Prompt and response tokens of this step's batch."),
    Metric("perf/num_response_tokens", "sum", "tokens", "Tokens of this step's batch that the policy sampled."),
    Metric("perf/throughput", "derived", "tokens/s/device",
           "perf/total_num_tokens / (timing_s/step · number of devices)."),
    Metric("perf/time_per_step", "derived", "s", "Equal to timing_s/step."),
    Metric("perf/cpu_memory_used_gb", "max", "GiB", "Memory in use on the host, whoever uses it; the fullest host."),
    Metric("perf/max_memory_{allocated,reserved}_gb", "max", "GiB",
           "Peak memory that the device allocator had {handed out,taken} during the step; the fullest device."),
    # -- wall times of the driver; a phase entered twice adds
    Metric("timing_s/gen", "driver_sum", "s", "Generation, from waking the engines to the last sample.",
           {"roll": "time/rollout", "trinity": "time/gen"}),
    Metric("timing_s/generate_sequences", "mean", "s", "Time an engine was busy generating; mean over engines.",
           {"trinity": "time/generate_sequences"}),
    Metric("timing_s/reward", "driver_sum", "s",
           "Scoring, until the last reward has arrived.", {"trinity": "time/reward"}),
    Metric("timing_s/old_log_prob", "driver_sum", "s",
           "Log-probs of the policy before the update.", {"trinity": "time/old_log_prob"}),
    Metric("timing_s/ref", "driver_sum", "s", "Log-probs of the reference model.", {"trinity": "time/ref"}),
    Metric("timing_s/values", "driver_sum", "s", "Values of the critic before the update.", {"trinity": "time/values"}),
    Metric("timing_s/adv", "driver_sum", "s", "Computing advantages.", {"roll": "time/adv", "trinity": "time/adv"}),
    Metric("timing_s/update_actor", "driver_sum", "s",
           "All optimizer steps of the policy.", {"trinity": "time/update_actor"}),
    Metric("timing_s/update_critic", "driver_sum", "s",
           "All optimizer steps of the critic.", {"trinity": "time/update_critic"}),
    Metric("timing_s/update_weights", "driver_sum", "s",
           "Sending weights to the engines.", {"trinity": "time/update_weights"}),
    Metric("timing_s/testing", "driver_sum", "s",
           "Evaluation; absent from steps without one.", {"trinity": "time/eval"}),
    Metric("timing_s/save_checkpoint", "driver_sum", "s",
           "What saving the step before held this one up; absent where it was not saved.",
           {"trinity": "time/save_checkpoint"}),
    Metric("timing_s/step", "driver_sum", "s",
           "Generation to weight update; without evaluation, checkpoints and logging.",
           {"trinity": "time/step"}),
    Metric("timing_s/step_wall", "driver_sum", "s",
           "The whole step, everything included.", {"trinity": "time/step_wall"}),
    Metric("timing_per_token_ms/gen", "derived", "ms", "1000 · timing_s/gen / perf/num_response_tokens."),
    Metric("timing_per_token_ms/{old_log_prob,ref,values,adv,update_critic,update_actor}", "derived", "ms",
           "1000 · timing_s of the phase / perf/total_num_tokens; several epochs do not multiply the tokens."),
    # -- phases, of every rank
    Metric("time/{infix}/{total,execute,onload,offload}", "span", "s",
           "Seconds of the slowest rank in the phase: {all of them,at work,moving states in,moving states out}."),
    Metric("time/{infix}/skew", "span", "s", "The slowest rank's total minus the fastest one's."),
    Metric("memory/cpu/{infix}/start/{rss,vms}", "max", "GiB",
           "{Resident,Virtual} memory of a rank's process when it enters the phase; the largest."),
    Metric("memory/cpu/{infix}/end/{rss,vms}", "max", "GiB",
           "{Resident,Virtual} memory of a rank's process when it leaves the phase; the largest."),
    # -- health rules
    Metric("alerts/{rule}", "derived", "level",
           "What a health rule makes of the step: 0 fine, 1 info, 2 warn, 3 critical; cooling down does not hide it."),
)  # fmt: skip

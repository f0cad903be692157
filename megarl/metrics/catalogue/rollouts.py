"""Metrics of what was generated: lengths, groups, samples, evaluation."""

from __future__ import annotations

from megarl.metrics.catalogue.metric import Metric

_GENERATED = "steps that generate"
_SCORES = "steps whose reward function gives named scores"
_EVAL = "steps with an evaluation"
_DETAILED = "with metrics.detailed_stats"
_FILTERED = "with rollout.filters or rollout.max_refills"
_SERVERS = "runs with servers that generate"
_CONVERSE = "runs with rollout.converse"
_OVER_PROMPTS = "{mean,std,max,min}"

_LENGTHS = (
    Metric("response_length/{mean,max,min}", "{mean,max,min}", "tokens",
           "The {mean,max,min} over samples of the tokens after the prompt, tool output included."),
    Metric("tokens/response_length/{mean,max,min}", "{mean,max,min}", "tokens",
           "The {mean,max,min} over samples of the tokens that the policy sampled; without tools, the response's."),
    Metric("response_length/clip_ratio", "mean", "fraction", "Share of samples that the length limit ended."),
    Metric("response/aborted_ratio", "mean", "fraction",
           "Share of samples with an empty response or aborted by the engine."),
    Metric("prompt_length/{mean,max,min}", "{mean,max,min}", "tokens",
           "The {mean,max,min} over samples of the prompt's tokens.",
           {"roll": "tokens/prompt_length/{mean,max,min}"}),
    Metric("prompt_length/clip_ratio", "mean", "fraction", "Share of samples whose prompt is as long as is allowed.",
           when=_GENERATED),
    Metric("global_seqlen/{min,max,minmax_diff,mean}", "last", "tokens",
           "Tokens of the data-parallel ranks if samples were dealt in the order of their arrival: the "
           "{fewest,most,most less fewest,mean}."),
    Metric("global_seqlen/balanced_{min,max}", "last", "tokens",
           "Tokens of the data-parallel ranks as they are dealt: the {fewest,most}."),
)  # fmt: skip

_GROUPS = (
    Metric("experience_pipeline/experience_count", "sum", "samples", "Samples left for training after all filters."),
    Metric("experience_pipeline/num_failed_samples", "sum", "samples",
           "Samples without a reward because a reward function failed; their groups are left out.", when=_GENERATED),
    Metric("experience_pipeline/num_failed_groups", "sum", "prompts",
           "Groups that were left out because a sample of theirs has no reward.", when=_GENERATED),
    Metric("experience_pipeline/filter/{filter}/dropped_groups", "sum", "groups",
           "Groups that a filter left nothing of, refills included.", when="with rollout.filters"),
    Metric("experience_pipeline/filter/{filter}/dropped_samples", "sum", "samples",
           "Samples that a filter took away, those of dropped groups included.", when="with rollout.filters"),
    Metric("experience_pipeline/num_drawn_groups", "sum", "groups", "Groups that the step drew, refills included.",
           when=_FILTERED),
    Metric("experience_pipeline/keep_ratio", "mean", "fraction",
           "Share of the groups that the step drew which it trains on: filters and failed rewards take the others.",
           when=_FILTERED),
    Metric("experience_pipeline/num_refills", "sum", "rounds",
           "How often the step drew new prompts for groups that it lost.", when=_FILTERED),
    Metric("experience_pipeline/too_long_prompts", "sum", "prompts",
           "Prompts of the training data that were left out because they are too long (data.too_long).",
           when="steps that draw from training data"),
    Metric("experience_pipeline/group_advantages/reward_mean/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over groups of the group's mean reward.", when=_GENERATED),
    Metric("experience_pipeline/group_advantages/reward_std/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over groups of the sample standard deviation (n-1) of the group's rewards.",
           when=_GENERATED),
    Metric("rollout/{score}/mean", "mean", "score",
           "The mean over prompts of the prompt's mean of a named score that the reward function gave.",
           {"base": "rollout/{score}"}, when=_SCORES),
    Metric("rollout/{score}/{max,min}", "{max,min}", "score",
           "The {max,min} over prompts of the prompt's mean of a named score.", when=_SCORES),
    Metric("rollout/zero_variance_group_ratio", "mean", "fraction",
           "Share of the groups trained on, after all filters, whose rewards are all equal: no advantage.",
           when="groups of two and more"),
    Metric("rollout/finished_task_count", "sum", "prompts", "Prompts that were answered.", when=_GENERATED),
    Metric("rollout/model_version", "last", "version", "The version of the weights that generated.", when=_GENERATED),
    Metric("sample/model_version/{mean,max,min}", "{mean,max,min}", "version",
           "The {mean,max,min} over samples of the version of the weights that generated them; where an update came in "
           "between, of the oldest.", when=_GENERATED),
    Metric("sample/staleness/{mean,max,min}", "{mean,max,min}", "version",
           "The {mean,max,min} over samples of how many versions the weights that generated them (the oldest) are "
           "behind those that the step starts from: training/global_step - 1 - version; 0 is on-policy.",
           when=_GENERATED),
    Metric("rollout/num_turns/{mean,max,min}", "{mean,max,min}", "turns",
           "The {mean,max,min} over samples of how often the policy spoke in the conversation.", when=_CONVERSE),
    Metric("rollout/num_tool_tokens/{mean,max,min}", "{mean,max,min}", "tokens",
           "The {mean,max,min} over samples of the tokens that tools and the environment said.", when=_CONVERSE),
    Metric("rollout/time/run_execution/{mean,max,min}", "{mean,max,min}", "s",
           "The {mean,max,min} over conversations of the time from the first to the last line of their function.",
           when=_CONVERSE),
    Metric("rollout/time/task_execution/{mean,max,min}", "{mean,max,min}", "s",
           "The {mean,max,min} over prompts of the time in which their conversations ran.", when=_CONVERSE),
    Metric("sample/task_count", "last", "prompts", "Different prompts in the training batch."),
)  # fmt: skip

_ENGINES = (
    Metric("engine/num_healthy", "last", "servers", "Servers that serve at the end of the step's generation.",
           when=_SERVERS),
    Metric("engine/num_restarts", "sum", "servers", "Servers that were started again.", when=_SERVERS),
    Metric("engine/num_retries", "sum", "requests", "Requests that were sent again, to another server if there is one.",
           when=_SERVERS),
    Metric("engine/num_rejected", "sum", "requests",
           "Answers that were thrown away because something about them is wrong: lengths, ids, log-probs, version.",
           when=_SERVERS),
    Metric("engine/num_lost", "sum", "servers", "Servers that stopped serving.", when=_SERVERS),
    Metric("engine/num_aborted", "sum", "requests", "Requests that were ended before they were done.", when=_SERVERS),
)  # fmt: skip


def _evaluated(prefix: str, metric: str, aliases: dict[str, str], when: str) -> list[Metric]:
    """The statistics of one score of an evaluation. ``metric`` is a name, or ``{score}``."""
    stem = f"{prefix}/{{task}}/{metric}"
    what = "score" if metric == "score" else "named score"
    meanings = {
        "mean@{k}": f"Mean {what} of the k attempts at a prompt, then the mean over prompts; an aborted one scores "
                    "what the reward function gives it.",
        "std@{k}": f"Population standard deviation of a prompt's k {what}s, then the mean over prompts; absent for "
                   "k = 1.",
        "best@{k}": "Expected best of k attempts drawn without replacement from those made; the mean over prompts.",
        "worst@{k}": "Expected worst of k attempts drawn in the same way; the mean over prompts.",
    }  # fmt: skip
    entries = [
        Metric(f"{stem}/{name}", "derived", "reward", doc, aliases if name.startswith("mean") else {}, when)
        for name, doc in meanings.items()
    ]
    entries += [
        Metric(f"{stem}/{name}/{_OVER_PROMPTS}", "derived", "reward",
               f"The {_OVER_PROMPTS} over prompts of the prompt's {name.replace('{k}', 'k')}; std of the population.",
               when=f"{when}, {_DETAILED}")
        for name in meanings
    ]  # fmt: skip
    return entries


_ALIASES = {
    "verl": "val/test_score/{task}",
    "verl-core": "val-core/{task}/reward/mean@{k}",
    "base": "eval/{task}/score",
}

_EVALUATION = (
    *_evaluated("eval", "score", _ALIASES, _EVAL),
    *_evaluated("eval", "{score}", {"base": "eval/{task}/{score}"}, _EVAL),
    *_evaluated("bench", "score", {}, "after the last step, with eval.bench_sets"),
    *_evaluated("bench", "{score}", {}, "after the last step, with eval.bench_sets"),
    *(Metric(f"{kind}/{{task}}/score/stderr@{{k}}", "derived", "reward",
             "Standard error of score/mean@k over prompts: population deviation of the prompts' means / √prompts.",
             when=when) for kind, when in (("eval", _EVAL), ("bench", "after the last step, with eval.bench_sets"))),
    Metric("eval/{task}/failed_runs", "sum", "failures", "Attempts that the engine aborted.", when=_EVAL),
    Metric("bench/{task}/failed_runs", "sum", "failures", "Attempts that the engine aborted.",
           when="after the last step, with eval.bench_sets"),
    Metric("val/score/{mean,max,min}", "{mean,max,min}", "reward",
           "The {mean,max,min} over all evaluation samples of all tasks.", when=_EVAL),
)  # fmt: skip

ENTRIES: tuple[Metric, ...] = (*_LENGTHS, *_GROUPS, *_ENGINES, *_EVALUATION)

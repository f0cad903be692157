"""What a step's groups look like, in numbers. The same groups give the same numbers, generated or read back."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.protocols import Statistics
from megarl.core.sample import Group


def report_rollouts(
    groups: Sequence[Group], max_new_tokens: int, max_prompt_tokens: int, step: int, meter: Statistics
) -> None:
    """Everything about scored samples that ``step`` trains on. The driver has the groups; other ranks have nothing to
    report.
    """
    report_lengths(groups, max_new_tokens, meter)
    _report_prompts(groups, max_prompt_tokens, meter)
    _report_scores(groups, meter)
    _report_versions(groups, step, meter)
    _report_turns(groups, meter)


def report_lengths(groups: Sequence[Group], max_new_tokens: int, meter: Statistics) -> None:
    """Lengths of prompts and responses, and how many responses hit the limit or are empty."""
    for group in groups:
        num_prompt = len(group.prompt.token_ids)
        for sample in group.samples:
            num_response = sample.num_response_tokens
            for name, length in (
                ("prompt_length", num_prompt),
                ("response_length", len(sample.token_ids) - num_prompt),
                ("tokens/response_length", num_response),
            ):
                meter.mean(f"{name}/mean", length, 1)
                meter.max(f"{name}/max", length)
                meter.min(f"{name}/min", length)
            cut = sample.finish == "length" or num_response > max_new_tokens
            meter.mean("response_length/clip_ratio", cut, 1)
            meter.mean("response/aborted_ratio", sample.finish == "abort" or num_response == 0, 1)
            meter.sum("perf/total_num_tokens", len(sample.token_ids))
            meter.sum("perf/num_response_tokens", num_response)
            meter.sum("perf/num_squared_tokens", len(sample.token_ids) ** 2)
    if groups:
        meter.sum("experience_pipeline/experience_count", sum(len(group.samples) for group in groups))
        meter.last("sample/task_count", len({group.prompt.id for group in groups}))


def _report_prompts(groups: Sequence[Group], limit: int, meter: Statistics) -> None:
    for group in groups:
        is_full = len(group.prompt.token_ids) >= limit
        meter.mean("prompt_length/clip_ratio", is_full * len(group.samples), len(group.samples))
    if groups:
        meter.sum("rollout/finished_task_count", len(groups))


def _report_scores(groups: Sequence[Group], meter: Statistics) -> None:
    """The named scores that a reward function gave beside its number: each prompt's mean, then over prompts."""
    for group in groups:
        names = {name for sample in group.samples for name in sample.scores}
        for name in sorted(names):
            values = [sample.scores[name] for sample in group.samples if name in sample.scores]
            mean = sum(values) / len(values)
            meter.mean(f"rollout/{name}/mean", mean, 1)
            meter.max(f"rollout/{name}/max", mean)
            meter.min(f"rollout/{name}/min", mean)


def _report_versions(groups: Sequence[Group], step: int, meter: Statistics) -> None:
    """Which weights the samples come from, and how many updates those lag behind the ones that ``step`` starts from."""
    for sample in (sample for group in groups for sample in group.samples):
        for name, value in (("model_version", sample.version), ("staleness", step - 1 - sample.version)):
            meter.mean(f"sample/{name}/mean", value, 1)
            meter.max(f"sample/{name}/max", value)
            meter.min(f"sample/{name}/min", value)
        meter.last("rollout/model_version", sample.version)


def _report_turns(groups: Sequence[Group], meter: Statistics) -> None:
    """How often the policy spoke in conversations, and how much it was told. Single answers have no turns."""
    for sample in (sample for group in groups for sample in group.samples if sample.turns):
        num_own = sum(turn.speaker == "policy" for turn in sample.turns)
        num_told = sum(turn.num_tokens for turn in sample.turns if turn.speaker == "environment")
        for name, value in (("num_turns", num_own), ("num_tool_tokens", num_told)):
            meter.mean(f"rollout/{name}/mean", value, 1)
            meter.max(f"rollout/{name}/max", value)
            meter.min(f"rollout/{name}/min", value)

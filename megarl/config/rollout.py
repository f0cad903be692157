"""What is generated in a step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from megarl.config.filters import Filter
from megarl.config.names import ConversePath
from megarl.config.section import REQUIRED, Section, setting

_MANY = 1_000_000_000


def _path_as_mapping(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ConverseSettings(Section):
    """Conversations of several turns. ``converse: PATH`` is short for ``converse: {name: PATH}``."""

    name: ConversePath = setting(
        REQUIRED,
        "The function converse(prompt, generate) that leads a conversation.",
        rule='the import path of a function: "package.module:function"',
    )
    options: dict[str, Any] = setting({}, "Keyword arguments of the function.")
    max_turns: int = setting(
        16,
        "How often the policy may speak in a conversation.",
        ge=1,
        le=1_000_000,
        elsewhere="max_assistant_turns max_actions_per_traj max_env_steps",
    )
    max_turn_tokens: int | None = setting(
        None, "Longest turn of the policy; null: whatever is left of max_new_tokens.", ge=1, le=_MANY
    )
    tool_timeout_seconds: float = setting(
        60.0,
        "How long the function may be busy between two turns of the policy. Then the sample has failed.",
        gt=0,
        le=86_400,
        elsewhere="tool_timeout env_timeout",
    )


class RolloutSettings(Section):
    """What is generated in a step."""

    prompts_per_step: int = setting(
        32, "Prompts per step.", ge=1, le=_MANY, elsewhere="rollout_batch_size train_batch_size batch_size num_prompts"
    )
    group_size: int = setting(
        8,
        "Samples per prompt. grpo needs at least 2.",
        ge=1,
        le=1_000_000,
        elsewhere="num_generations n n_samples_per_prompt num_return_sequences num_samples rollout_n",
    )
    max_new_tokens: int = setting(
        REQUIRED,
        "Longest response; longer ones are cut. Of a conversation, all that follows the prompt, tool output included.",
        ge=1,
        le=_MANY,
        elsewhere="max_tokens response_length max_response_length max_completion_length max_length",
    )
    max_prompt_tokens: int = setting(
        1024,
        "Longest prompt that is accepted. With max_new_tokens it sizes the engine's memory.",
        ge=1,
        le=_MANY,
        elsewhere="max_prompt_length prompt_length",
    )
    converse: Annotated[ConverseSettings, BeforeValidator(_path_as_mapping)] | None = setting(
        None,
        "The function that leads a conversation of several turns, with tools or an environment; null: one answer.",
        elsewhere="multi_turn rollout_workflow custom_generate_function_path",
    )
    temperature: float = setting(1.0, "Sampling temperature.", gt=0, le=100)
    top_p: float = setting(1.0, "Sample from the smallest set of tokens with this probability; 1: off.", gt=0, le=1)
    top_k: int = setting(0, "Sample from this many of the likeliest tokens; 0: off.", ge=0, le=_MANY)
    max_staleness: int = setting(
        0,
        "How many steps old the weights may be that a sample comes from. Above 0, servers that are not colocated "
        "generate ahead while the trainer trains.",
        ge=0,
        le=1_000,
        elsewhere="max_head_offpolicyness staleness_threshold async_steps off_policy_steps",
    )
    extra_prompts: int = setting(
        0,
        "Prompts that a step starts beyond prompts_per_step. It takes the first prompts_per_step groups that finish; "
        "only with servers.",
        ge=0,
        le=_MANY,
        elsewhere="over_sampling_batch_size",
    )
    unfinished: Literal["restart", "carry_over"] = setting(
        "restart",
        "What becomes of the groups that a step did not wait for: the next one starts them anew, or goes on where "
        "they stopped (partial rollout).",
        elsewhere="partial_rollout",
    )
    filters: list[Filter] = setting(
        [],
        "Groups, or samples of them, that are not trained on, in the order in which they are asked. zero_variance: "
        "groups whose rewards are all equal. length: samples that were cut at max_new_tokens, or have more than "
        "max_tokens (drop: group drops the group of such a sample). reward_range: groups whose mean reward is below "
        "low or above high. Your own function takes a group and says whether to keep it.",
        rule='a list; each a name (zero_variance, length, reward_range, "package.module:function") or {name, options}',
        elsewhere="filter_groups dynamic_sampling_filter_path query_filter_config max_len_mask overlong_filter",
    )
    max_refills: int = setting(
        0,
        "A step that has lost groups draws new prompts in their place, at most so many times; then it trains on what "
        "it has. 0: not at all.",
        ge=0,
        le=1000,
        elsewhere="max_num_gen_batches dynamic_sampling max_additional_running_prompts",
    )
    record: bool = setting(
        False,
        "Write every group, in full precision, to rollouts/ in the run's directory.",
        elsewhere="save_debug_rollout_data",
    )
    replay: str | None = setting(
        None,
        "Train from the groups that another run recorded in this directory (its rollouts/), without an engine.",
        min_length=1,
        elsewhere="load_debug_rollout_data debug_train_only",
    )
    only: bool = setting(
        False, "Generate, score and record; train nothing.", elsewhere="debug_rollout_only rollout_only"
    )
    kept_groups: int = setting(
        0,
        "Groups of every tenth step that are written to samples/, texts included, for people to read; 0: none.",
        ge=0,
        le=1_000_000,
        elsewhere="rollout_data_dir log_samples num_examine",
    )

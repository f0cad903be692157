"""Every kind of mistake in a configuration file: its line, its rule and its remedy, and all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.metrics.at_k import at_k
from tests.unit.config_files import MINIMAL, load_text, refusal


@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        (
            "num_steps: 10",
            "num_step: 10",
            "MRL-1001 run.yaml:3 run.num_step is not a setting. Did you mean run.num_steps?",
        ),
        (
            "num_steps: 10",
            "max_steps: 10",
            "MRL-1001 run.yaml:3 run.max_steps is not a setting. Did you mean run.num_steps?",
        ),
        ("rollout:", "roll_out:", "MRL-1001 run.yaml:17 roll_out is not a setting. Did you mean rollout?"),
        ("rollout:", "zzz:", "MRL-1001 run.yaml:17 zzz is not a setting.\n    Sections: run, model, actor"),
        (
            "max_new_tokens: 44",
            "max_tokens: 44",
            "MRL-1001 run.yaml:18 rollout.max_tokens is not a setting. Did you mean rollout.max_new_tokens?",
        ),
        (
            "name: grpo",
            "name: grpo\n  gae_lambda: 1",
            "MRL-1001 run.yaml:17 algorithm.gae_lambda is not a setting of grpo; it belongs to ppo.",
        ),
        (
            "name: grpo",
            "name: grpo\n  options: {}",
            "MRL-1001 run.yaml:17 algorithm.options is not a setting of grpo; it belongs to algorithms by import path.",
        ),
        (
            "name: grpo",
            "name: a:B\n  num_epochs: 2",
            "MRL-1001 run.yaml:17 algorithm.num_epochs is not a setting of custom; it belongs to grpo and ppo.",
        ),
        ("  num_steps: 10\n", "", "MRL-1002 run.yaml:1 run.num_steps is required but not given."),
        (
            "data:\n  train: builtin:carry\n",
            "",
            "MRL-1002 run.yaml:1 data is required but not given.\n    It needs at least: train.",
        ),
        ("rollout:\n  max_new_tokens: 44\n", "", "MRL-1002 run.yaml:15 rollout is required but not given."),
        ("  name: grpo", "  clip_low: 0.1", "MRL-1002 run.yaml:15 algorithm.name is required but not given."),
        (
            "num_steps: 10",
            "num_steps: 10.0",
            "MRL-1003 run.yaml:3 run.num_steps=10.0 is not allowed. It must be a whole "
            "number >= 1 and <= 1000000000.\n    Write num_steps: 10",
        ),
        (
            "num_steps: 10",
            "num_steps: '10'",
            'MRL-1003 run.yaml:3 run.num_steps="10" is not allowed. It must be a whole '
            "number >= 1 and <= 1000000000.\n    Remove the quotes: num_steps: 10",
        ),
        ("num_steps: 10", "num_steps: true", "MRL-1003 run.yaml:3 run.num_steps=true is not"),
        ("num_steps: 10", "num_steps: [10]", "MRL-1003 run.yaml:3 run.num_steps=a list of 1 is not"),
        ("name: small", "name: 3", "MRL-1003 run.yaml:2 run.name=3 is not allowed."),
        (
            "  train: builtin:carry",
            "  train: builtin:carry\n  shuffle: yes",
            'MRL-1003 run.yaml:21 data.shuffle="yes" is not '
            "allowed. It must be true or false.\n    Write shuffle: true",
        ),
        (
            "data:\n",
            "critic:\ndata:\n",
            "MRL-1003 run.yaml:19 critic=null is not allowed. It must be a mapping.\n    critic: has nothing under it.",
        ),
        (
            "algorithm:\n  name: grpo",
            "algorithm: grpo",
            'MRL-1003 run.yaml:15 algorithm="grpo" must be a mapping.\n    Write algorithm: {name: "grpo"}.',
        ),
        (
            "num_steps: 10",
            "num_steps: 0",
            "MRL-1004 run.yaml:3 run.num_steps=0 is not allowed. It must be a whole number >= 1",
        ),
        (
            "name: small",
            "name: a b",
            'MRL-1004 run.yaml:2 run.name="a b" is not allowed. It must be text of at most 100',
        ),
        ("name: small", "name: ../up", 'MRL-1004 run.yaml:2 run.name="../up" is not'),
        ("name: grpo", "name: gpro", 'MRL-1004 run.yaml:16 algorithm.name="gpro" is not known. Did you mean grpo?'),
        ("name: grpo", "name: 'a b:c'", 'MRL-1004 run.yaml:16 algorithm.name="a b:c" is not allowed.'),
        ("name: grpo", "name: grpo\n  kl: {coef: .nan}", "MRL-1004 run.yaml:17 algorithm.kl.coef=NaN is not allowed."),
        (
            "name: grpo",
            "name: grpo\n  kl: {coef: .inf}",
            "MRL-1004 run.yaml:17 algorithm.kl.coef=Infinity is not allowed.",
        ),
        (
            "name: grpo",
            "name: grpo\n  kl: {estimator: k4}",
            'MRL-1004 run.yaml:17 algorithm.kl.estimator="k4" is not allowed. It must be one of k1, k2, k3.',
        ),
        (
            "builtin:carry",
            "builtin:cary",
            'MRL-1004 run.yaml:20 data.train="builtin:cary" is not allowed. It must be a JSONL or Parquet file, '
            "or a built-in task: builtin:carry, builtin:carry_held_out, builtin:sort, builtin:sort_held_out. "
            "Did you mean builtin:carry?",
        ),
        (
            "data:\n",
            "reward: exactmatch\ndata:\n",
            'MRL-1004 run.yaml:19 reward="exactmatch" is not allowed. It must be '
            "exact_match, math_answer, format, length, code, remote, judge, outcome, model, coin_flip, "
            'or the import path of a function: "package.module:function". Did you mean exact_match?',
        ),
        (
            "data:\n",
            "eval: {sets: {a b: {data: builtin:sort}}}\ndata:\n",
            'MRL-1004 run.yaml:19 "a b" cannot be the name of a set in eval.sets.',
        ),
        (
            "data:\n",
            "eval: {sets: {a: {data: builtin:sort, num_samples: 2}}}\ndata:\n",
            "MRL-1005 run.yaml:19 eval.sets.a.num_samples=2 at temperature 0",
        ),
        ("data:\n", "eval: {every: 2}\ndata:\n", "MRL-1005 run.yaml:19 eval.every=2 has nothing to evaluate"),
        (
            "data:\n",
            "reward: {name: exact_match, options: {afer: x}}\ndata:\n",
            "MRL-1001 run.yaml:19 reward.options.afer is "
            "not an option of exact_match. Did you mean reward.options.after?",
        ),
        (
            "data:\n",
            "reward: {name: exact_match, options: {after: 3}}\ndata:\n",
            "MRL-1003 run.yaml:19 reward.options.after=3",
        ),
        (
            "max_new_tokens: 44",
            "max_new_tokens: 44\n  group_size: 1",
            "MRL-1005 run.yaml:19 rollout.group_size=1 is too small for grpo",
        ),
        (
            "name: grpo",
            "name: ppo\n  critic_warmup_steps: 10",
            "MRL-1005 run.yaml:17 algorithm.critic_warmup_steps=10 leaves the actor nothing: run.num_steps=10.",
        ),
        (
            "data:\n",
            "actor: {optimizer: {schedule: linear}}\ndata:\n",
            "MRL-1005 run.yaml:19 actor.optimizer.schedule=linear with min_lr_ratio=1 never lowers lr.",
        ),
        ("  tokenizer: builtin:characters\n", "", "MRL-1002 run.yaml:5 model.tokenizer is required"),
        (
            "  config:\n",
            "  path: somewhere\n  config:\n",
            "MRL-1005 run.yaml:7 model.path and model.config are both given.",
        ),
        ("vocab_size: 64", "vocab_size: many", "MRL-1203 run.yaml:6 model.config: vocab_size must be given"),
        ("Qwen3ForCausalLM", "Gemma3ForCausalLM", "MRL-1201 run.yaml:6 model.config: architecture"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_its_remedy(tmp_path: Path, old: str, new: str, start: str) -> None:
    assert old in MINIMAL
    message = refusal(tmp_path, MINIMAL.replace(old, new))
    assert message.startswith(start), message


def test_all_problems_are_reported_at_once_the_most_fundamental_first(tmp_path: Path) -> None:
    text = MINIMAL.replace("num_steps: 10", "num_steps: 10\n  num_ranks: 3\n  sed: 1\n  sed: 2")
    text += "actor: {parallel: {tp_size: 2}, offload: sometimes, optimizer: {lr: -1}}\n"
    codes = [line.split(" ")[0] for line in refusal(tmp_path, text).splitlines() if line.startswith("MRL-")]
    assert codes == ["MRL-1007", "MRL-1001", "MRL-1003", "MRL-1004", "MRL-1101"]


def test_a_problem_that_may_follow_from_another_is_left_out(tmp_path: Path) -> None:
    # 3 ranks do not divide by the default tp_size either way; what the user meant by "two" is unknown
    text = (
        MINIMAL.replace("num_steps: 10", "num_steps: 10\n  num_ranks: 3")
        + "actor: {parallel: {tp_size: two, pp_size: 2}}\n"
    )
    message = refusal(tmp_path, text)
    assert "MRL-1003" in message
    assert "MRL-1101" not in message


def test_at_most_ten_problems_are_shown(tmp_path: Path) -> None:
    text = MINIMAL + "actor:\n" + "".join(f"  strange{i}: 1\n" for i in range(14))
    message = refusal(tmp_path, text)
    assert message.count("MRL-1001") == 10
    assert message.endswith("... and 4 more.\n14 problems. Nothing was started.")


def test_foreign_text_is_cut_and_escaped(tmp_path: Path) -> None:
    text = MINIMAL + f'actor: {{offload: "\\e[31m{"x" * 500}", "\\e]0;{"y" * 500}": 1}}\n'
    message = refusal(tmp_path, text)
    assert "\x1b" not in message
    assert "x" * 81 not in message
    assert "y" * 81 not in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("actor.overlap_param_gather=true",), "needs actor.overlap_grad_reduce=true."),
        (("run.device=cpu", "actor.optimizer.cpu_offload=true"), "actor.optimizer.cpu_offload=true has nowhere to go"),
        (("checkpoint.best_metric=eval/a/score/mean@1",), "is never measured: eval.sets is empty."),
        (
            ("eval={every: 5, sets: {a: {data: builtin:sort}}}", "checkpoint.best_metric=eval/a/score/mean@2"),
            "Did you mean eval/a/score/mean@1?",
        ),
        (
            ("eval={sets: {a: {data: builtin:sort}}}", "checkpoint.best_metric=eval/a/score/mean@1"),
            "is not measured between the first and the last step: eval.every=0.",
        ),
    ],
)
def test_contradictions_of_models_and_checkpoints(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    message = refusal(tmp_path, MINIMAL, *overrides)
    assert message.startswith("MRL-1005 command line")
    assert words in message


def test_the_best_metric_may_be_any_that_an_evaluation_reports(tmp_path: Path) -> None:
    evaluated = "eval={every: 5, sets: {a/b: {data: builtin:sort, num_samples: 6, temperature: 1.0}}}"
    for name in at_k([[0.0] * 6]):
        load_text(tmp_path, MINIMAL, evaluated, f"checkpoint.best_metric=eval/a/b/score/{name}")
    assert "MRL-1005" in refusal(tmp_path, MINIMAL, evaluated, "checkpoint.best_metric=eval/a/b/score/best@5")


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("actor.context_parallel_size", "actor.parallel.cp_size"),
        ("actor.parallel.expert_model_parallel_size", "actor.parallel.ep_size"),
        ("critic.virtual_pipeline_model_parallel_size", "critic.parallel.vpp_size"),
        ("actor.recompute_granularity", "actor.recompute"),
        ("critic.gradient_checkpointing", "critic.recompute"),
        ("run.save_freq", "checkpoint.every"),
        ("run.save_interval", "checkpoint.every"),
        ("checkpoint.save_steps", "checkpoint.every"),
        ("run.max_actor_ckpt_to_keep", "checkpoint.keep"),
        ("model.torch_dtype", "model.dtype"),
        ("actor.optimizer_cpu_offload", "actor.optimizer.cpu_offload"),
    ],
)
def test_names_of_other_programs_lead_to_ours(tmp_path: Path, foreign: str, ours: str) -> None:
    assert f"Did you mean {ours}?" in refusal(tmp_path, MINIMAL, f"{foreign}=2")

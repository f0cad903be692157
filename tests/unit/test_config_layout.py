"""The arithmetic of layouts and batches, against an independent statement of the same rules."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from megarl.config.layout import check_layout, microbatch_tokens, model_shape
from megarl.config.load import load_config
from megarl.config.phases import on_device, phases, residents
from megarl.config.schema import RunConfig
from megarl.config.summary import rank_of, summarise
from tests.unit.config_files import CONFIGS, MINIMAL, load_text, refusal


def changed(config: RunConfig, **sections: dict[str, object]) -> RunConfig:
    """A copy with other values, past the checks of `load_config`, so that `check_layout` is asked alone."""
    tree = config.model_dump()
    for section, values in sections.items():
        tree[section] = {**(tree[section] or {}), **values}
    return RunConfig.model_validate(tree)


def codes(config: RunConfig) -> set[str]:
    return {problem.code for problem in check_layout(config)}


def test_the_grid_of_layouts_agrees_with_plain_counting(tmp_path: Path) -> None:
    base = load_text(tmp_path, MINIMAL)
    ranks, tps, pps = (1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4), (1, 2, 3)
    models = ((4, 2, 384, 2), (6, 6, 96, 3), (12, 4, 100, 6))  # heads, kv heads, mlp columns, layers
    num_valid = 0
    for num_ranks, tp, pp, (heads, kv_heads, columns, layers) in itertools.product(ranks, tps, pps, models):
        shape = {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": columns,
            "num_hidden_layers": layers,
            "head_dim": 32,
        }
        config = changed(
            base,
            run={"num_ranks": num_ranks},
            model={"config": {**(base.model.config or {}), **shape}},
            actor={"parallel": {"tp_size": tp, "pp_size": pp}},
        )
        # the oracle deals ranks, heads, columns and layers out one by one and looks for a remainder
        expected = set()
        if len(range(0, num_ranks, tp * pp)) * tp * pp != num_ranks:
            expected.add("MRL-1101")
        if any(len(range(0, part, tp)) * tp != part for part in (heads, kv_heads, columns)):
            expected.add("MRL-1102")
        if len(range(0, layers, pp)) * pp != layers:
            expected.add("MRL-1103")
        assert codes(config) == expected, (num_ranks, tp, pp, heads, kv_heads, columns, layers)
        num_valid += not expected
    assert num_valid > 20  # the grid has both kinds


def test_every_size_that_is_called_valid_is_accepted(tmp_path: Path) -> None:
    for num_ranks, tp, pp in itertools.product((1, 2, 4, 6, 8), (1, 2, 3, 4, 8), (1, 2, 3)):
        base = changed(
            load_text(tmp_path, MINIMAL),
            run={"num_ranks": num_ranks},
            actor={"parallel": {"tp_size": tp, "pp_size": pp}},
        )
        for problem in check_layout(base):
            if problem.code not in ("MRL-1102", "MRL-1103"):
                continue
            key = {"MRL-1102": "tp_size", "MRL-1103": "pp_size"}[problem.code]
            for size in map(int, re.findall(r"\d+", problem.hints[0])):
                better = changed(base, actor={"parallel": {"tp_size": tp, "pp_size": pp, key: size}})
                assert problem.code not in codes(better)


def test_the_nearest_numbers_of_ranks_are_valid(tmp_path: Path) -> None:
    base = load_text(tmp_path, MINIMAL)
    for num_ranks, tp, pp in itertools.product(range(1, 14), (1, 2), (1, 2)):
        config = changed(base, run={"num_ranks": num_ranks}, actor={"parallel": {"tp_size": tp, "pp_size": pp}})
        for problem in check_layout(config):
            nearest = problem.hints[0].split(".")[1].removeprefix("num_ranks: ")
            assert nearest
            for valid in map(int, re.findall(r"\d+", nearest)):
                assert abs(valid - num_ranks) < tp * pp
                assert codes(changed(config, run={"num_ranks": valid})) == set()


@pytest.mark.parametrize(
    ("num_ranks", "prompts", "group", "minibatches", "fits"),
    [
        (1, 2, 2, 2, True),
        (1, 1, 2, 3, False),
        (2, 4, 2, 4, True),
        (4, 4, 2, 4, False),
        (8, 1, 8, 1, True),
        (8, 1, 7, 1, False),
    ],
)
def test_every_replica_gets_a_sample_of_every_minibatch(
    tmp_path: Path, num_ranks: int, prompts: int, group: int, minibatches: int, fits: bool
) -> None:
    config = changed(
        load_text(tmp_path, MINIMAL),
        run={"num_ranks": num_ranks},
        rollout={"prompts_per_step": prompts, "group_size": group},
        algorithm={"num_minibatches": minibatches},
    )
    assert codes(config) == (set() if fits else {"MRL-1104"})


def test_the_message_shows_the_arithmetic(tmp_path: Path) -> None:
    overrides = ("run.num_ranks=4", "rollout.prompts_per_step=3", "rollout.group_size=2", "algorithm.num_minibatches=2")
    message = refusal(tmp_path, MINIMAL, *overrides)
    assert "3 prompts x 2 = 6, but num_minibatches 2 x data-parallel 4 = 8 are the least." in message
    assert "Set rollout.prompts_per_step to 4 or more" in message
    message = refusal(tmp_path, MINIMAL, "run.num_ranks=6", "actor.parallel.tp_size=2", "actor.parallel.pp_size=2")
    assert "tp_size 2 x pp_size 2 = 4 ranks per replica, 6 / 4 = 1.5." in message
    assert "Nearest run.num_ranks: 4 or 8." in message
    message = refusal(tmp_path, MINIMAL, "run.num_ranks=6", "actor.parallel.tp_size=3")
    assert "actor.parallel.tp_size=3 cannot split this model: 4 heads / 3 and 2 kv heads / 3 are not whole." in message
    assert "Valid here: 1, 2." in message


def test_supervised_batches_must_reach_every_replica(tmp_path: Path) -> None:
    base = changed(load_text(tmp_path, MINIMAL), run={"num_ranks": 8})
    assert codes(changed(base, warmup={"num_steps": 1, "batch_size": 7})) == {"MRL-1104"}
    assert codes(changed(base, warmup={"num_steps": 1, "batch_size": 8})) == set()
    sft = load_text(tmp_path, MINIMAL.replace("name: grpo", "name: sft\n  batch_size: 15\n  num_minibatches: 2"))
    assert codes(sft) == set()
    assert codes(changed(sft, run={"num_ranks": 8})) == {"MRL-1104"}


@pytest.mark.parametrize(("max_new_tokens", "fits"), [(126, True), (127, True), (128, False), (5000, False)])
def test_a_response_must_leave_a_position_for_the_prompt(tmp_path: Path, max_new_tokens: int, fits: bool) -> None:
    config = changed(
        load_text(tmp_path, MINIMAL),
        rollout={"max_new_tokens": max_new_tokens},
        actor={"max_tokens_per_microbatch": 10_000},
    )
    assert codes(config) == (set() if fits else {"MRL-1106"})


def test_a_microbatch_must_hold_a_response(tmp_path: Path) -> None:
    assert codes(changed(load_text(tmp_path, MINIMAL), actor={"max_tokens_per_microbatch": 45})) == set()
    message = refusal(tmp_path, MINIMAL, "actor.max_tokens_per_microbatch=44")
    assert "MRL-1105 command line actor.max_tokens_per_microbatch=44 cannot hold one sequence" in message


def test_every_minibatch_needs_a_whole_group(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL, "rollout.prompts_per_step=2", "algorithm.num_minibatches=3")
    assert "MRL-1104" in message
    assert "rollout.prompts_per_step=2 cannot fill algorithm.num_minibatches=3" in message


def test_parameters_are_counted_as_in_the_recipe() -> None:
    assert model_shape(load_config(CONFIGS / "quickstart.yaml")).num_parameters == 410_368


def test_every_rank_has_one_place(tmp_path: Path) -> None:
    overrides = ("run.num_ranks=12", "actor.parallel.tp_size=2", "actor.parallel.pp_size=2")
    config = load_text(tmp_path, MINIMAL, *overrides)
    places = [rank_of(config, tp, pp, dp) for tp in range(2) for pp in range(2) for dp in range(3)]
    assert sorted(places) == list(range(12))
    assert rank_of(config, 1, 0, 0) == 1  # tensor-parallel peers are neighbours
    assert rank_of(config, 0, 1, 0) == 6  # stages are furthest apart, as Megatron places them
    text = summarise(config)
    assert "12 ranks = tp 2 x pp 2 x dp 3" in text
    assert re.search(r"^  2 +1 +1 +10-11$", text, re.MULTILINE)


def test_the_report_shows_how_every_model_is_cut(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: grpo", "name: ppo\n  kl: {coef: 0.1}").replace(
        "num_hidden_layers: 2", "num_hidden_layers: 8"
    )
    text = text.replace("num_key_value_heads: 2", "num_key_value_heads: 2\n    head_dim: 32")
    overrides = (
        "run.num_ranks=8",
        "actor.parallel={tp_size: 2, sequence_parallel: true, pp_size: 2, vpp_size: 2, cp_size: 2}",
        "critic.parallel={pp_size: 2, stage_layers: [5, 3]}",
        "reference.parallel={}",
    )
    config = load_text(tmp_path, text, *overrides)
    report = summarise(config)
    assert "8 ranks = tp 2 x pp 2 x cp 2 x dp 1" in report
    assert re.search(r"^  actor +tp \+ sp 2 x pp 2 x vpp 2 x cp 2 +1 +2 in each of 4 ", report, re.MULTILINE)
    assert re.search(r"^  critic +pp 2 +4 +5, 3 ", report, re.MULTILINE)
    whole = f"{model_shape(config).num_parameters:,}"
    found = re.search(r"^  reference +whole +8 +8 +([\d,]+)$", report, re.MULTILINE)
    assert found
    # all weights are there but the last norm, which is not counted apart
    assert int(whole.replace(",", "")) - int(found[1].replace(",", "")) == 128
    assert re.search(r"^  0 +1 +2-3, 6-7 +4-7$", report, re.MULTILINE)  # the second stage of each round
    assert "every 10 steps, at the end and when the run is stopped" in report


def test_experts_are_in_the_report(tmp_path: Path) -> None:
    moe = "{architectures: [Qwen3MoeForCausalLM], num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32}"
    config = load_text(tmp_path, MINIMAL, f"model.config={moe}", "run.num_ranks=4", "actor.parallel.ep_size=4")
    report = summarise(config)
    assert re.search(r"^  experts +2 of 8 per token, mlp 32, in 2 layers$", report, re.MULTILINE)
    assert re.search(r"^  actor +ep 4 +4 +2 ", report, re.MULTILINE)


def test_context_parallel_ranks_share_a_microbatch(tmp_path: Path) -> None:
    overrides = ("run.num_ranks=2", "actor.parallel.cp_size=2")
    config = load_text(tmp_path, MINIMAL, *overrides, "actor.max_tokens_per_microbatch=23")
    assert microbatch_tokens(config, "actor") == 46
    message = refusal(tmp_path, MINIMAL, *overrides, "actor.max_tokens_per_microbatch=22")
    assert "MRL-1105" in message
    assert "actor.max_tokens_per_microbatch=22 x cp_size 2 = 44 tokens cannot hold one sequence" in message
    assert "Use at least 23" in message


def test_the_critic_s_microbatches_and_replicas_count_too(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: grpo", "name: ppo")
    assert load_text(tmp_path, text).critic_max_tokens == 4096
    message = refusal(tmp_path, text, "critic.max_tokens_per_microbatch=44")
    assert "critic.max_tokens_per_microbatch=44 cannot hold one sequence" in message
    few = ("run.num_ranks=8", "rollout.prompts_per_step=1", "rollout.group_size=4", "actor.parallel.cp_size=2")
    load_text(tmp_path, text, *few)
    message = refusal(tmp_path, text, *few, "critic.parallel={}")
    assert "num_minibatches 1 x data-parallel 8 of the critic = 8 are the least." in message


def test_many_ranks_are_shown_in_few_rows(tmp_path: Path) -> None:
    text = summarise(load_text(tmp_path, MINIMAL, "run.num_ranks=100", "rollout.prompts_per_step=64"))
    assert "... and 84 more rows" in text
    assert text.count("\n") < 60


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (
            "name: grpo",
            "actor_infer/generate actor_train/compute_log_probs actor_train/train_step actor_train/model_update "
            "actor_train/do_checkpoint",
        ),
        (
            "name: grpo\n  kl: {coef: 0.1}",
            "actor_infer/generate reference/compute_log_probs actor_train/compute_log_probs actor_train/train_step "
            "actor_train/model_update actor_train/do_checkpoint",
        ),
        (
            "name: ppo\n  kl: {coef: 0.1}",
            "actor_infer/generate reference/compute_log_probs actor_train/compute_log_probs critic/compute_values "
            "critic/train_step actor_train/train_step actor_train/model_update actor_train/do_checkpoint",
        ),
    ],
)
def test_only_the_phases_of_models_that_exist_are_listed(tmp_path: Path, algorithm: str, names: str) -> None:
    config = load_text(tmp_path, MINIMAL.replace("name: grpo", algorithm))
    assert [phase.name for phase in phases(config)] == names.split()


def test_supervised_runs_only_train(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: grpo", "name: sft").replace("rollout:\n  max_new_tokens: 44\n", "")
    config = load_text(tmp_path, text)
    assert [phase.name for phase in phases(config)] == ["actor_train/train_step", "actor_train/do_checkpoint"]
    assert residents(config) == ["actor"]


def test_a_model_that_is_not_offloaded_stays(tmp_path: Path) -> None:
    config = load_text(tmp_path, MINIMAL.replace("name: grpo", "name: ppo"), "critic.offload=false")
    saved = next(phase for phase in phases(config) if phase.name == "actor_train/do_checkpoint").parts
    assert {"actor.weights", "actor.optimizer", "critic.weights", "critic.optimizer"} <= saved
    table = {
        phase.name: {model: on_device(config, phase, model) for model in residents(config)} for phase in phases(config)
    }
    assert table["actor_infer/generate"] == {"engine": "weights, kv_cache", "actor": "-", "critic": "stays"}
    assert table["critic/train_step"] == {"engine": "-", "actor": "-", "critic": "weights, grads, optimizer"}

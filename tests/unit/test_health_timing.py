"""When rules speak: warm-up, patience, cool-down, escalation, stages, resuming; and what they remember."""

from __future__ import annotations

import math
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.config.alerts import AlertSettings
from megarl.config.health_rules import HEALTH_RULES
from megarl.metrics.health.alert import Alert, Severity, format_alert
from megarl.metrics.health.health import Health
from megarl.metrics.registry import check
from tests.unit.health_series import numbers_in, of, only, raised, state

WARN, CRITICAL = Severity.WARN, Severity.CRITICAL
KL = "actor/ppo_kl"


def steps_of(changes: dict[str, float], *pieces: tuple[float, int]) -> list[tuple[int, Severity]]:
    """When H05 (warn above 0.02, critical above 0.1) speaks, with these settings."""
    found = raised(Health(only("H05", **changes)), of(KL, *pieces))
    return [(alert.step, alert.severity) for alert in found]


def test_warm_up_counts_the_steps_that_have_the_metric() -> None:
    assert steps_of({"warmup": 4, "patience": 1}, (0.05, 9)) == [(5, WARN)]
    assert steps_of({"warmup": 4, "patience": 2}, (0.05, 9)) == [(6, WARN)]
    health = Health(only("H05", warmup=4, patience=1))
    series = [metrics for one in of(KL, (0.05, 6)) for metrics in ({"actor/lr": 1.0}, one)]
    assert [alert.step for alert in raised(health, series)] == [10]


def test_patience_is_broken_by_a_good_step_and_not_by_a_step_without_the_metric() -> None:
    assert steps_of({"patience": 3}, (0.05, 2), (0.01, 1), (0.05, 2)) == []
    assert steps_of({"patience": 3}, (0.05, 2), (0.01, 1), (0.05, 3)) == [(6, WARN)]
    series = [*of(KL, (0.05, 2)), {"actor/lr": 1.0}, *of(KL, (0.05, 1))]
    assert [alert.step for alert in raised(Health(only("H05", patience=3)), series)] == [4]


def test_it_repeats_itself_after_the_cool_down_only() -> None:
    assert steps_of({"patience": 1, "cooldown": 10}, (0.05, 25)) == [(1, WARN), (11, WARN), (21, WARN)]
    flapping = [(0.05, 1), (0.01, 1)] * 12
    assert steps_of({"patience": 1, "cooldown": 10}, *flapping) == [(1, WARN), (11, WARN), (21, WARN)]


def test_what_gets_worse_is_said_at_once_and_what_gets_better_is_not() -> None:
    found = steps_of({"patience": 1, "cooldown": 10}, (0.05, 3), (0.5, 3), (0.05, 12))
    assert found == [(1, WARN), (4, CRITICAL), (14, WARN)]


def test_the_severity_is_one_that_all_steps_of_the_patience_reached() -> None:
    assert steps_of({"patience": 3}, (0.05, 2), (0.5, 1)) == [(3, WARN)]
    assert steps_of({"patience": 3}, (0.05, 2), (0.5, 3)) == [(3, WARN), (5, CRITICAL)]


def test_levels_are_those_of_the_step_cooling_down_or_not() -> None:
    health = Health(only("H05", patience=2))
    levels = []
    for step, metrics in enumerate([*of(KL, (0.05, 4), (0.5, 2), (0.01, 1)), {"actor/lr": 1.0}], start=1):
        health.check(step, metrics)
        levels.append(health.levels)
    assert levels == [{"alerts/H05": level} for level in (0, 2, 2, 2, 2, 3, 0)] + [{}]
    assert all(type(level) is int for one in levels for level in one.values())
    assert check("alerts/H05").unit == "level"


def test_thresholds_can_be_changed() -> None:
    assert steps_of({"warn": 0.06}, (0.05, 9)) == []
    assert steps_of({"critical": 0.04}, (0.05, 9))[0] == (2, CRITICAL)


def test_rules_can_be_switched_off_one_by_one_and_all_at_once() -> None:
    assert steps_of({"enabled": False}, (0.5, 9)) == []
    health = Health(AlertSettings(enabled=False))
    assert raised(health, [{"actor/grad_norm": math.nan}]) == []
    assert health.levels == {}


def test_a_new_stage_starts_baselines_and_warm_ups_afresh() -> None:
    """Steps that generate take ten times as long as demonstrations, and gradients are larger. Nothing is wrong."""
    demonstration = {"timing_s/step": 0.1, "timing_s/update_actor": 0.1, "actor/grad_norm": 0.1, "perf/throughput": 9.0}
    reward = {"timing_s/step": 1.0, "timing_s/update_actor": 0.4, "actor/grad_norm": 3.0, "perf/throughput": 1.0}
    scored = {"critic/score/mean": 0.5, "critic/score/max": 1.0}
    health = Health(AlertSettings())
    assert raised(health, [demonstration] * 60 + [reward | scored] * 60) == []
    assert {found.rule for found in raised(Health(AlertSettings()), [demonstration] * 60 + [reward] * 60)} == {
        "H09", "H11", "H22",
    }  # fmt: skip


def test_a_step_without_its_scores_is_no_new_stage() -> None:
    scored = {"critic/score/mean": 0.5, "timing_s/update_actor": 1.0, "actor/grad_norm": 1.0}
    bare = {"actor/grad_norm": 1.0}
    series = [scored, bare] * 8 + [scored | {"actor/grad_norm": 99.0}]
    assert [found.rule for found in raised(Health(AlertSettings()), series)] == ["H09"]


def test_the_evaluation_before_training_counts_as_an_evaluation_and_as_nothing_else() -> None:
    health = Health(AlertSettings())
    opening = {
        "eval/a/score/mean@1": 0.8,
        "eval/a/score/stderr@1": 0.0,
        "training/global_step": 0.0,
        "timing_s/testing": 1.0,
    }
    assert health.check(0, opening) == []
    assert health.levels == {"alerts/H14": 0, "alerts/H21": 0}
    series = [{"eval/a/score/mean@1": score, "eval/a/score/stderr@1": 0.0} for score in (0.8, 0.8, 0.8, 0.1)]
    assert [found.step for found in raised(health, series)] == [4]


def test_fatal_rules_stop_at_warnings_and_do_not_cool_down() -> None:
    health = Health(AlertSettings(fatal=["H14", "H16"]))
    assert health.fatal(health.check(1, {"response/aborted_ratio": 0.01})) is None
    assert health.fatal(health.check(2, {"actor/grad_norm": math.nan}).copy()) is not None
    again = health.check(3, {"actor/grad_norm": math.nan})
    stopping = health.fatal(again)
    assert stopping is not None
    assert (stopping.rule, stopping.severity) == ("H14", CRITICAL)
    assert Health(AlertSettings()).fatal(again) is None


def test_the_console_line() -> None:
    health = Health(only("H05"))
    alerts = [alert for step in (11, 12) for alert in health.check(step, {KL: 0.031})]
    assert [format_alert(alert, 12) for alert in alerts] == [
        "ALERT H05 warn step 12: actor/ppo_kl is 0.031, above 0.02 (2 times in a row): the policy moves far from the "
        "rollout policy in one step. Lower actor.optimizer.lr, algorithm.num_epochs or algorithm.num_minibatches."
    ]
    assert format_alert(Alert("H14", CRITICAL, "not finite: user/é\nstep:3 - x"), 1) == (
        "ALERT H14 critical step 1: not finite: user/\\xe9 step:3 - x"
    )


NAMED = """
critic/score/mean critic/score/max critic/score/min actor/entropy actor/ppo_kl actor/kl_loss actor/pg_clipfrac actor/lr
actor/grad_norm critic/grad_norm critic/returns/mean critic/values/mean critic/value_errors/var critic/vf_explained_var
timing_s/step timing_s/gen timing_s/update_actor timing_s/reward response_length/clip_ratio response/aborted_ratio
critic/reward_clip_frac actor/valid_sample_ratio actor/ratio_max rollout/zero_variance_group_ratio perf/mfu/actor
perf/throughput perf/cpu_memory_used_frac actor/skipped_updates training/global_step sample/model_version/mean
time/actor_train/train_step/total time/actor_train/train_step/onload time/actor_train/train_step/offload
memory/cpu/actor_train/train_step/end/rss memory/actor_train/train_step/end/onload/max_reserved_frac/0
memory/actor_train/train_step/end/onload/allocated/0 memory/actor_train/train_step/end/offload/allocated/0
eval/a/score/mean@1 eval/b/c/score/mean@4 eval/a/score/stderr@1 eval/b/c/score/stderr@4
mismatch/newest_logprob_gap_mean sample/staleness/min mismatch/engine/a:1/root_gap_mean
mismatch/engine/a:1/num_tokens mismatch/engine/b:1/root_gap_mean mismatch/engine/b:1/num_tokens
"""
NAMES = NAMED.split()


def wild_run(seed: int, num_steps: int) -> list[dict[str, float]]:
    """Regimes of random lengths in which every metric has its own size, trend, noise and gaps."""
    draw = random.Random(seed)
    records: list[dict[str, float]] = []
    while len(records) < num_steps:
        level = {name: draw.choice((0.0, 0.01, 0.3, 1.0, 2.0, 30.0)) for name in NAMES}
        trend = {name: draw.choice((0.0, 0.0, 0.01, -0.01)) for name in NAMES}
        missing = {name: draw.choice((0.0, 0.0, 0.5, 1.0)) for name in NAMES}
        for i in range(draw.randint(1, 80)):
            records.append(
                {
                    name: math.nan
                    if draw.random() < 0.001
                    else level[name] * (1 + trend[name] * i + draw.gauss(0, 0.02))
                    for name in NAMES
                    if draw.random() >= missing[name]
                }
            )
    return records[:num_steps]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), split=st.integers(0, 299))
@example(seed=71132, split=0)  # most steps take no time at all
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(seed: int, split: int) -> None:
    records = wild_run(seed, 300)
    whole = Health(AlertSettings(), allocator_figures=True)
    said, levels = [], []
    for step, metrics in enumerate(records):
        said.append(whole.check(step, metrics))
        levels.append(whole.levels)
    resumed = Health(AlertSettings(), allocator_figures=True)
    for step in range(split):  # as a ledger has them: sorted, with the alerts of the step among them
        resumed.check(step, dict(sorted((records[step] | levels[step]).items())))
    for step in range(split, 300):
        assert resumed.check(step, records[step]) == said[step]
        assert resumed.levels == levels[step]
    assert state(resumed) == state(whole)


def test_the_wild_runs_make_most_rules_speak() -> None:
    """Else the test above would compare silence with silence."""
    spoken = {found.rule for seed in range(20) for found in raised(Health(AlertSettings(), True), wild_run(seed, 300))}
    assert len(spoken) >= 20


def test_the_memory_of_a_long_run_is_that_of_a_short_one() -> None:
    """Also if the names of the metrics keep changing."""
    health = Health(AlertSettings(), allocator_figures=True)
    draw = random.Random(0)
    sizes = []
    for step in range(1, 20_001):
        metrics = {name: draw.random() for name in NAMES}
        metrics[f"user/{step % 40}"] = 0.0
        health.check(step, metrics)
        if step in (1000, 20_000):
            sizes.append((len(state(health)), len(numbers_in(vars(health)["_names"]))))
    assert sizes[1][0] - sizes[0][0] <= len(HEALTH_RULES)  # a rule that spoke remembers a level beside the step
    assert sizes[1][1] <= 17 * 3 * len(NAMES)

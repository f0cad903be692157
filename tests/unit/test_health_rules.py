"""Every rule speaks when it should, in the right step, with the metric, the number and a setting; and not otherwise."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field

import pytest

from megarl.config import catalogue
from megarl.config.health_rules import HEALTH_RULES
from megarl.metrics.health.alert import Severity
from megarl.metrics.health.health import RULES, Health
from megarl.metrics.health.windows import rises_significantly, robust_slope, slope
from tests.unit.health_series import of, only, raised, together

INFO, WARN, CRITICAL = Severity.INFO, Severity.WARN, Severity.CRITICAL
SCORE, ENTROPY, KL = "critic/score/mean", "actor/entropy", "actor/kl_loss"
ON, OFF = "memory/actor_train/train_step/end/onload", "memory/actor_train/train_step/end/offload"
SPAN = "time/actor_train/model_update"


@dataclass(frozen=True)
class Case:
    """A series, and the first alert of the rule; or ``step`` None, if the rule must keep quiet."""

    rule: str
    series: list[dict[str, float]]
    step: int | None = None
    severity: Severity = WARN
    words: tuple[str, ...] = field(default=())


def critic(values: float, explained: float) -> list[dict[str, float]]:
    one = {"critic/returns/mean": 1.0, "critic/values/mean": values, "critic/value_errors/var": 0.25}
    return [one | {"critic/vf_explained_var": explained}] * 25


def step_seconds(*seconds: float) -> list[dict[str, float]]:
    """Steps whose growth is all in the generation."""
    return [{"timing_s/step": one, "timing_s/gen": one - 0.5, "timing_s/update_actor": 0.5} for one in seconds]


def evaluations(*scores: float, error: float = 0.02) -> list[dict[str, float]]:
    """Every tenth step evaluates."""
    return [
        {"eval/a/b/score/mean@1": scores[step // 10 - 1], "eval/a/b/score/stderr@1": error}
        if step % 10 == 0
        else {"actor/lr": 1.0}
        for step in range(1, 10 * len(scores) + 1)
    ]


def versions(behind: int) -> list[dict[str, float]]:
    return [{"training/global_step": step, "sample/model_version/mean": step - behind} for step in range(1, 9)]


GAP = "mismatch/newest_logprob_gap_mean"
FRESH = {"sample/staleness/min": 0.0}


def gaps(*pieces: tuple[float, int], **others: float) -> list[dict[str, float]]:
    return together(of(GAP, *pieces), sample__staleness__min=0.0, **others)


def servers(*found: tuple[float, int]) -> list[dict[str, float]]:
    """One step with every server's gap and tokens; the samples are stale, so that only servers are compared."""
    names = [f"mismatch/engine/127.0.0.1:{30000 + number}" for number in range(len(found))]
    step = {"sample/staleness/min": 1.0, GAP: 9.0}
    for name, (gap, num_tokens) in zip(names, found, strict=True):
        step |= {f"{name}/root_gap_mean": math.sqrt(gap), f"{name}/num_tokens": num_tokens}
    return [step]


NOISE = random.Random(0)
NOISY_RISE = [{SCORE: 0.3 + 0.002 * step + NOISE.gauss(0, 0.02)} for step in range(200)]
SMALL = {KL: 1e-5, "actor/pg_clipfrac": 0.001, "actor/lr": 1e-7}

CASES = [
    Case("H01", [{SCORE: 0.5 - 0.001 * i} for i in range(100)], 100, INFO, (SCORE, "-0.1 in 100 steps")),
    Case("H01", of(SCORE, (0.3, 100)), 100, INFO),
    Case("H01", NOISY_RISE),
    Case("H01", of(SCORE, (0.5, 99))),
    Case("H02", together(of(SCORE, (0, 10)), critic__score__max=0.0), 10, WARN, (SCORE, "are 0", "10 times")),
    Case("H02", together(of(SCORE, (0, 9), (0.1, 1), (0, 9)), critic__score__max=0.0)),
    Case("H02", together(of(SCORE, (0, 20)), critic__score__max=1.0)),
    Case("H03", together(of(ENTROPY, (0.7, 13)), critic__score__mean=1.0), 13, INFO, (ENTROPY, "0.7", "0.4 to 0.6")),
    Case("H03", together(of(ENTROPY, (0.5, 10), (0.1, 3)), critic__score__mean=1.0), 13, WARN, ("0.1", "0.25", "0.5")),
    Case("H03", together(of(ENTROPY, (0.5, 10), (0.04, 3)), critic__score__mean=1.0), 13, CRITICAL, ("0.04", "0.05")),
    Case("H03", together(of(ENTROPY, (0.5, 50)), critic__score__mean=1.0)),
    Case("H03", of(ENTROPY, (4.0, 10), (0.02, 50))),  # demonstrations are meant to lower it
    Case("H04", together(of(ENTROPY, (0.5, 10), (1.1, 3)), critic__score__mean=1.0), 13, WARN, (ENTROPY, "1.1", "0.5")),
    Case("H04", together(of(ENTROPY, (0.5, 10), (0.9, 30)), critic__score__mean=1.0)),
    Case("H04", together(of(ENTROPY, (0.0, 10), (0.01, 30)), critic__score__mean=1.0)),
    Case("H05", of("actor/ppo_kl", (0.031, 2)), 2, WARN, ("actor/ppo_kl", "0.031", "0.02")),
    Case("H05", of("actor/ppo_kl", (-0.031, 2)), 2, WARN, ("actor/ppo_kl", "0.031")),
    Case("H05", of("actor/ppo_kl", (0.2, 2)), 2, CRITICAL, ("0.2", "0.1")),
    Case("H05", of("actor/ppo_kl", (0.031, 1), (0.0, 5), (0.031, 1)), 7),
    Case("H05", of("actor/ppo_kl", (0.031, 1), (0.01, 5), (0.031, 1), (0, 10))),
    Case("H06", of(KL, (0.01, 20), (0.2, 5)), 25, WARN, (KL, "0.2", "10 times", "0.01")),
    Case("H06", [{KL: 0.01 * 1.001**i} for i in range(55)], 55, WARN, (KL, "rose in each of 54 steps")),
    Case("H06", of(KL, (0.01, 20), (0.09, 80))),
    Case("H06", of(KL, (-0.01, 20), (0.01, 80))),  # k1, which may be negative
    Case("H07", [SMALL | {SCORE: 0.5}] * 50, 50, INFO, (KL, "1e-05", "actor/pg_clipfrac", "0.001", "1e-07")),
    Case("H07", [SMALL | {SCORE: 0.5 + 0.001 * i} for i in range(200)]),
    Case("H07", [SMALL | {SCORE: 0.5, KL: 0.1}] * 80),
    Case("H08", of("actor/pg_clipfrac", (0.3, 5)), 5, WARN, ("actor/pg_clipfrac", "0.3", "0.2")),
    Case("H08", of("actor/pg_clipfrac", (0.3, 4), (0.2, 1), (0.3, 4))),
    Case("H09", of("actor/grad_norm", (1.0, 10), (11.0, 1)), 11, CRITICAL, ("actor/grad_norm", "11", "recent 1")),
    Case("H09", of("critic/grad_norm", (math.nan, 1)), 1, CRITICAL, ("critic/grad_norm is nan", "critic.optimizer.lr")),
    Case("H09", of("actor/skipped_updates", (0.0, 3), (2.0, 1)), 4, CRITICAL, ("actor/skipped_updates is 2", "finite")),
    Case("H09", of("actor/grad_norm", (1.0, 9), (11.0, 1))),  # too early to know what is usual
    Case("H09", of("actor/grad_norm", (1.0, 20), (9.9, 3))),
    Case("H09", of("actor/grad_norm", (0.0, 20), (0.09, 3))),
    Case("H10", critic(0.1, 0.5), 20, WARN, ("critic/values/mean", "0.1", "0.5 deviations")),
    Case("H10", critic(0.9, -0.1), 20, WARN, ("critic/vf_explained_var", "-0.1")),
    Case("H10", critic(0.9, 0.1)),
    Case("H10", of("critic/returns/mean", (1.0, 30))),  # no critic
    Case("H11", step_seconds(*[1.0] * 25, *[1.5] * 15), 40, WARN, ("timing_s/step", "1.5", "timing_s/gen (from 0.5")),
    Case("H11", step_seconds(*(10 * 1.0055**i for i in range(59))), 59, WARN, ("0.55% per step", "timing_s/gen")),
    Case("H11", step_seconds(*[1.0] * 25, *[1.29] * 60)),
    Case("H11", step_seconds(*[0.51] * 25, *[0.6] * 60)),
    Case("H12", [{"timing_s/step": 1.0, "timing_s/gen": 0.6, "timing_s/ref": 0.1}] * 20, 20, INFO,
         ("timing_s/gen is 60%",)),
    Case("H12", [{"timing_s/step": 1.0, "timing_s/gen": 0.5, "timing_s/ref": 0.5, "timing_s/testing": 9.0}] * 40),
    Case("H12", [{"timing_s/step": 1.0, "timing_s/update_actor": 1.0}] * 40),  # demonstrations: nothing else to do
    Case("H13", [{f"{ON}/max_reserved_frac/3": 0.93, f"{ON}/max_reserved_frac/4": 0.5}], 1, WARN,
         ("0.93", "device 3 in actor_train/train_step")),
    Case("H13", [{f"{ON}/max_reserved_frac/0": 0.98}], 1, CRITICAL, ("0.98", "0.97")),
    Case("H13", [{f"{ON}/max_reserved_frac/0": 0.5, "perf/allocator_retries": 2.0}], 1, WARN, ("retries is 2",)),
    Case("H13", [{f"{ON}/max_reserved_frac/0": 0.91, f"{ON}/max_reserved/0": 80.0, "perf/allocator_retries": 0.0}] * 9),
    Case("H14", [{"a/b": 1.0}, {"a/b": math.nan, "c/d": -math.inf}], 2, CRITICAL, ("a/b = nan", "c/d = -inf")),
    Case("H14", [dict.fromkeys("abcde", math.inf)], 1, CRITICAL, ("a = inf", "and 2 more")),
    Case("H14", [{"a/b": 1.7e308, "c/d": 1.7e308}]),
    Case("H15", of("response_length/clip_ratio", (0.2, 5)), 5, WARN, ("response_length/clip_ratio", "0.2", "0.1")),
    Case("H15", of("response_length/clip_ratio", (0.01, 10), (0.05, 5)), 15, WARN, ("0.05", "2 times", "0.01")),
    Case("H15", of("response_length/clip_ratio", (0.001, 10), (0.01, 30))),
    Case("H16", of("response/aborted_ratio", (0.01, 1)), 1, INFO, ("response/aborted_ratio", "0.01")),
    Case("H16", of("response/aborted_ratio", (0.06, 1)), 1, WARN, ("0.06", "0.05")),
    Case("H16", of("response/aborted_ratio", (0.0, 9))),
    Case("H17", of("critic/reward_clip_frac", (0.3, 5)), 5, WARN, ("critic/reward_clip_frac", "0.3")),
    Case("H17", of("critic/reward_clip_frac", (0.2, 20))),
    Case("H18", of("actor/valid_sample_ratio", (0.4, 5)), 5, WARN, ("actor/valid_sample_ratio", "0.4", "0.5")),
    Case("H18", of("actor/valid_sample_ratio", (0.5, 20))),
    Case("H19", of("actor/ratio_max", (11.0, 3)), 3, WARN, ("actor/ratio_max", "11", "10")),
    Case("H19", of("actor/ratio_max", (11.0, 2), (2.0, 1), (11.0, 2))),
    Case("H20", together(of("critic/score/max", (1.0, 5)), of("critic/score/min", (1.0, 5)),
                         rollout__zero_variance_group_ratio=1.0), 5, WARN, ("critic/score/max", "both 1")),
    Case("H20", together(of("critic/score/max", (1.0, 9)), of("critic/score/min", (1.0, 9)))),  # no groups
    Case("H20", together(of("critic/score/max", (1.0, 9)), of("critic/score/min", (1.0, 9)),
                         rollout__zero_variance_group_ratio=1.0, critic__values__mean=0.5)),  # a critic
    Case("H20", together(of("critic/score/max", (1.0, 9)), of("critic/score/min", (0.0, 9)),
                         rollout__zero_variance_group_ratio=0.5)),
    Case("H21", evaluations(0.8, 0.81, 0.8, 0.7), 40, WARN, ("eval/a/b/score/mean@1", "0.7", "best 0.81", "0.02")),
    Case("H21", evaluations(0.1, 0.3, 0.5, 0.7, 0.9, 0.2), 60, WARN),  # a collapse after a long rise
    Case("H21", evaluations(0.8, 0.7, error=0.05)),  # few prompts: that may be chance
    Case("H21", evaluations(0.1, 0.5, 0.8, 0.9, 0.85, 0.9)),
    Case("H21", evaluations(0.9, 0.89, error=0.0)),
    Case("H22", of("perf/throughput", (100.0, 15), (60.0, 10)), 25, WARN, ("perf/throughput", "60", "0.7", "100")),
    Case("H22", of("perf/mfu/actor", (0.4, 15), (0.2, 10)), 25, WARN, ("perf/mfu/actor", "0.2")),
    Case("H22", of("perf/throughput", (100.0, 15), (60.0, 9), (70.0, 1), (60.0, 9))),
    Case("H23", [{f"{SPAN}/total": 1.0, f"{SPAN}/onload": 0.2, f"{SPAN}/offload": 0.2}] * 5, 5, INFO,
         (f"{SPAN}/onload", "40%")),
    Case("H23", [{f"{SPAN}/total": 1.0, f"{SPAN}/onload": 0.2, f"{SPAN}/offload": 0.09}] * 9),
    Case("H23", [{f"{SPAN}/total": 0.01, f"{SPAN}/onload": 0.004, f"{SPAN}/offload": 0.004}] * 9),
    Case("H24", versions(2), 3, WARN, ("sample/model_version/mean", "2 behind")),
    Case("H24", versions(1)),
    Case("H25", [{"memory/cpu/a/b/end/rss": 1 + 0.006 * i} for i in range(209)], 209, WARN,
         ("memory/cpu/a/b/end/rss", "0.6 GiB per 100 steps")),
    Case("H25", [{"perf/cpu_memory_used_frac": 0.95}] * 10, 10, WARN, ("95%", "90%")),
    Case("H25", [{"memory/cpu/a/b/end/rss": 1 + 0.004 * i, "perf/cpu_memory_used_frac": 0.5} for i in range(300)]),
    Case("H26", [{f"{OFF}/allocated/7": 2.0, f"{ON}/allocated/7": 10.0}] * 3, 3, WARN, (f"{OFF}/allocated/7", "2 GiB")),
    Case("H26", [{f"{OFF}/allocated/7": 10.0, f"{ON}/allocated/7": 10.0}] * 9),  # was not meant to leave
    Case("H26", [{f"{OFF}/allocated/7": 0.9, f"{ON}/allocated/7": 10.0}] * 9),
    Case("H27", gaps((0.3, 1)), 1, WARN, (GAP, "0.3", "from the first step", "template", "rollout.temperature")),
    Case("H27", gaps((0.7, 1)), 1, CRITICAL, (GAP, "above 0.5")),
    Case("H27", gaps((1e-6, 5), (5e-4, 1)), 6, WARN, ("the usual 1e-06", "after the last push", "stale")),
    Case("H27", gaps((0.02, 3), (0.4, 1)), 4, WARN, ("after the last push",)),
    Case("H27", gaps((0.02, 9), (0.06, 1)), 10, WARN, ("drift apart", "algorithm.correction.kind")),
    Case("H27", gaps((0.2, 1), mismatch__logprob_gap_first_quarter=0.05, mismatch__logprob_gap_last_quarter=0.4),
         1, WARN, ("grows along the response", "KV cache", "rope")),
    Case("H27", servers((2e-6, 900), (0.004, 40), (1e-6, 900)), 1, WARN,
         ("mismatch/engine/127.0.0.1:30001/root_gap_mean", "127.0.0.1:30001 holds other weights")),
    Case("H27", servers((0.02, 4000), (0.08, 4000)), 1, WARN, ("127.0.0.1:30001 holds",)),
    Case("H27", servers((0.01, 4000), (0.025, 4000)) + servers((0.01, 4000), (0.2, 10))),  # few tokens say little
    Case("H27", servers((1e-6, 4000), (8e-5, 4000)) + servers((0.02, 4000)) + servers((0.02, 9), (0.5, 0))),
    Case("H27", gaps((0.03, 40)) + gaps((0.01, 40)) + gaps((0.03, 40))),
    Case("H27", [one | {"sample/staleness/min": 1.0} for one in gaps((0.9, 9))]),  # it holds what was learned since
]  # fmt: skip
LOUD = [case for case in CASES if case.step is not None]
QUIET = [case for case in CASES if case.step is None]


@pytest.mark.parametrize("case", LOUD, ids=lambda case: f"{case.rule}-{case.severity.name}-{case.step}")
def test_it_speaks(case: Case) -> None:
    found = raised(Health(only(case.rule), allocator_figures=True), case.series)
    assert found, "silent"
    first = found[0]
    assert (first.rule, first.step, first.severity) == (case.rule, case.step, case.severity), first
    for word in case.words:
        assert word in first.message
    assert any(".".join(setting.path) in first.message for setting in catalogue.settings()), "names no setting"


@pytest.mark.parametrize("case", QUIET, ids=lambda case: case.rule)
def test_it_keeps_quiet(case: Case) -> None:
    health = Health(only(case.rule), allocator_figures=True)
    assert raised(health, case.series) == []
    assert set(health.levels.values()) <= {0}


def test_every_rule_is_made_tested_and_described() -> None:
    assert list(HEALTH_RULES) == sorted(RULES) == [f"H{number:02d}" for number in range(1, 28)]
    assert {case.rule for case in LOUD} == {case.rule for case in QUIET} == set(RULES)
    for rule in HEALTH_RULES.values():
        assert rule.condition.format(**rule.thresholds) != rule.condition or not rule.thresholds
        assert all(f"{{{name}}}" in rule.condition for name in rule.thresholds), rule.id


def test_advice_names_settings_that_exist() -> None:
    sections = (
        "run|model|actor|critic|reference|algorithm|rollout|generation|weights|data|reward|eval|checkpoint|alerts"
    )
    known = {".".join(setting.path) for setting in catalogue.settings()}
    named = {
        name for rule in HEALTH_RULES.values() for name in re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z]", rule.advice)
    }
    assert len(named) > 20
    assert named <= known


def test_a_policy_that_starts_with_little_entropy_has_not_collapsed() -> None:
    series = together(of(ENTROPY, (0.03, 10), (0.004, 300)), critic__score__mean=0.9)
    assert {alert.severity for alert in raised(Health(only("H03")), series)} == {INFO}


def test_states_on_a_device_are_looked_at_only_where_an_allocator_is_read() -> None:
    series = [{f"{OFF}/allocated/7": 2.0, f"{ON}/allocated/7": 10.0}] * 9
    health = Health(only("H26"))
    assert raised(health, series) == []
    assert health.levels == {}


def test_what_the_run_allows_is_not_stale() -> None:
    assert raised(Health(only("H24"), max_staleness=2), versions(3)) == []
    (found,) = raised(Health(only("H24"), max_staleness=2), versions(4))
    assert "4 behind training/global_step, above 3" in found.message


def test_a_gap_of_a_sparse_model_points_to_its_routing() -> None:
    (found,) = raised(Health(only("H27"), is_sparse=True), gaps((0.3, 1)))
    assert "enable_return_routed_experts" in found.message


@pytest.mark.parametrize(("size", "spread"), [(1e-6, 1.0), (0.01, 1.0), (0.02, 2.0)])
def test_a_thousand_clean_steps_are_left_alone_and_a_bad_server_is_found_in_one(size: float, spread: float) -> None:
    """Token gaps are log-normal, which has a heavy tail; four servers serve 20 to 1000 tokens of a step each.

    A bad one adds 0.0033, which 1 % noise on the weights of a small model made, or four times a clean gap.
    """
    draw = random.Random(5)

    def step(bad: int | None = None) -> dict[str, float]:
        metrics, total, tokens = dict(FRESH), 0.0, 0
        for server in range(4):
            own = draw.choice((20, 100, 300, 1000)) if bad is None else 500
            more = max(0.0033, 4 * size) if server == bad else 0.0
            found = [size * draw.lognormvariate(-spread * spread / 2, spread) + more for _ in range(own)]
            name = f"mismatch/engine/127.0.0.1:{30000 + server}"
            metrics |= {f"{name}/root_gap_mean": sum(map(math.sqrt, found)) / own, f"{name}/num_tokens": own}
            total, tokens = total + sum(found), tokens + own
        return metrics | {GAP: total / tokens}

    health = Health(only("H27"))
    assert raised(health, [step() for _ in range(1000)]) == []
    (found,) = raised(health, [step(bad=2)], 1001)
    assert "127.0.0.1:30002 holds other weights" in found.message


def test_the_slope_is_that_of_least_squares() -> None:
    assert slope([1.0, 3.0, 5.0]) == 2.0
    assert slope([0.0, 0.0, 3.0]) == 1.5
    assert slope([0.1] * 100) == 0.0
    assert robust_slope([*range(30), 1000.0, *range(31, 50)]) == 1.0


def test_a_rise_is_significant_as_often_as_the_test_promises() -> None:
    """Of flat noise 5 % differ from 0 at p < 0.05, half of them upwards: 2.5 %. With 4000 draws the deviation of that
    share is 0.25 %, and four of them are allowed.
    """
    draw = random.Random(1)
    hits = sum(rises_significantly([draw.gauss(0, 1) for _ in range(50)]) for _ in range(4000))
    assert abs(hits / 4000 - 0.025) < 0.01
    assert rises_significantly([float(i) for i in range(50)])
    assert not rises_significantly([-float(i) for i in range(50)])

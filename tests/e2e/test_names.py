"""A run with everything on has every name of the documents that megarl began with."""

from __future__ import annotations

import json
import re

import pytest

from megarl.metrics.registry import check
from tests.e2e.runs import ROOT, Outcome, ledger, train
from tests.e2e.seed_names import (
    PHASES,
    ROLL,
    ROLL_TEMPLATES,
    TRINITY,
    TRINITY_FAMILIES,
    TRINITY_TEMPLATES,
    VERL_LOG,
    VERL_STEP,
)

pytestmark = pytest.mark.slow

TAG = "metrics_tag: "
REWARD = """
from megarl.rewards.reward import Reward

def score(prompt, sample):
    # right is whatever has an odd length, so that a model that knows nothing is right half of the time
    right = float(len(sample.response) % 2)
    return Reward(right - 0.5, {"accuracy": right, "format_score": float(":" in sample.response)})
"""
# critic, KL, supervised term, dual clip, evaluation with k = 2 and 4, a bench set, checkpoints
EVERYTHING = (
    "run.name=everything",
    "run.num_steps=2",
    "warmup.num_steps=1",
    "warmup.batch_size=8",
    "warmup.optimizer.warmup_steps=0",
    "rollout.prompts_per_step=4",
    "rollout.group_size=2",
    "rollout.max_new_tokens=12",
    "algorithm.critic_warmup_steps=0",
    "algorithm.dual_clip=3.0",
    "algorithm.num_minibatches=1",
    "algorithm.sft={coef: 0.1, negative_weight: 0.1}",
    "reward=rewarding:score",
    "eval.every=1",
    "eval.sets.held_out.max_prompts=4",
    "eval.sets.dummy={data: builtin:carry_held_out, max_prompts: 3, num_samples: 2, temperature: 1.0}",
    "eval.sets.gsm8k-eval={data: builtin:carry_held_out, max_prompts: 3, num_samples: 4, temperature: 1.0}",
    "eval.sets.openai/gsm8k={data: builtin:carry_held_out, max_prompts: 3}",
    "eval.bench_sets.gsm8k-eval={data: builtin:carry_held_out, max_prompts: 3, num_samples: 4, temperature: 1.0}",
    "monitor.detailed_stats=true",
    "checkpoint.every=1",
    "track_with=[stdout, stdout_json]",
)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    directory = tmp_path_factory.mktemp("everything")
    (directory / "rewarding.py").write_text(REWARD)
    outcome = train(ROOT / "configs" / "quickstart_ppo.yaml", directory, *EVERYTHING)
    assert outcome.code == 0, outcome.stderr
    return outcome


@pytest.fixture(scope="module")
def names(everything: Outcome) -> set[str]:
    """All names that a tracker of the run got; their view is ``all``, the default."""
    lines = [line for line in everything.stdout.splitlines() if line.startswith(TAG)]
    assert len(lines) == len(ledger(everything)) == 4
    return {name for line in lines for name in json.loads(line.removeprefix(TAG))["metrics"]}


@pytest.mark.parametrize("document", [ROLL, VERL_STEP, VERL_LOG, TRINITY], ids=["roll", "verl", "log", "trinity"])
def test_every_name_is_there(document: list[str], names: set[str]) -> None:
    assert [name for name in document if name not in names] == []


def test_every_template_is_filled_for_every_phase(everything: Outcome, names: set[str]) -> None:
    """With the cluster's name before the phase, as one of the documents has it, on both devices."""
    clusters = {phase: {name.split("/")[1] for name in names if f"/{phase}/" in name} for phase in PHASES}
    assert all(clusters.values())
    for phase, owners in clusters.items():
        own = next(owner for owner in sorted(owners) if f"time/{owner}/{phase}/total" in names)
        for template in ROLL_TEMPLATES:
            for device in ("0", "1"):
                name = template.format(metric_infix=f"{own}/{phase}", device_id=device)
                assert name in names, name


@pytest.mark.parametrize("phase", ["generate", "model_update", "do_checkpoint", "compute_values", "compute_rewards"])
def test_a_phase_that_one_cluster_has_is_also_there_by_its_bare_name(phase: str, names: set[str]) -> None:
    for template in ROLL_TEMPLATES:
        assert template.format(metric_infix=phase, device_id="0") in names


def test_two_clusters_do_not_share_a_bare_name(names: set[str]) -> None:
    assert "time/train_step/total" not in names


@pytest.mark.parametrize("template", [*TRINITY_TEMPLATES, *TRINITY_FAMILIES])
def test_templates_and_families_of_trinity(template: str, names: set[str]) -> None:
    pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template))
    assert any(re.match(pattern, name) for name in names)


def test_everything_emitted_is_documented(everything: Outcome) -> None:
    document = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for record in ledger(everything):
        for name in record["metrics"]:
            check(name)
    for family in (*ROLL, *VERL_STEP, *VERL_LOG):
        stem = family.split("/")[0]
        assert f"`{stem}/" in document, family


def test_the_identities_hold(everything: Outcome) -> None:
    """What is defined by other metrics of the same step is exactly that."""
    for record in ledger(everything)[2:]:
        m = record["metrics"]
        assert m["actor/ppo_ratio_clipfrac"] == pytest.approx(
            m["actor/ppo_ratio_high_clipfrac"] + m["actor/ppo_ratio_low_clipfrac"]
        )
        assert m["actor/valid_sample_ratio"] == m["actor/valid_samples"] / m["actor/total_samples"]
        # no value clip, token mean, one optimizer step
        assert m["critic/vf_loss"] == pytest.approx(0.5 * m["critic/error"], rel=1e-6)
        assert m["perf/throughput"] * 2 * m["timing_s/step"] == pytest.approx(m["perf/total_num_tokens"])
        assert m["time/old_log_probs_values"] == m["timing_s/old_log_prob"] + m["timing_s/values"]
        assert m["time/ref_log_probs_values_reward"] == m["timing_s/ref"] + m["timing_s/reward"]
        for statistic in ("mean", "max", "min"):
            assert m[f"response_length/{statistic}"] == m[f"tokens/response_length/{statistic}"]
        terms = m["actor/weighted_pg_loss"] + 0.001 * m["actor/kl_loss"] + 0.1 * m["actor/sft_loss"]
        assert m["actor/total_loss"] == pytest.approx(terms, abs=1e-6)  # float32
        # one optimizer step: the supervised term is made of its two parts
        parts = m.get("actor/positive_sft_loss", 0.0) + 0.1 * m.get("actor/negative_sft_loss", 0.0)
        assert m["actor/sft_loss"] == pytest.approx(parts, rel=1e-5)


def test_phases_keep_to_their_order(everything: Outcome) -> None:
    """Parts do not exceed the total; a peak never falls within a phase, and is never below what is in use."""
    for record in ledger(everything)[1:]:
        m = record["metrics"]
        infixes = [name[5:-6] for name in m if re.fullmatch(r"time/[^/]+/[^/]+/total", name)]
        for infix in infixes:
            parts = sum(m[f"time/{infix}/{part}"] for part in ("onload", "execute", "offload"))
            assert parts <= m[f"time/{infix}/total"] + 1e-9
            for device in (0, 1):
                moments = ("start/offload", "start/onload", "end/onload", "end/offload")
                peaks = [m[f"memory/{infix}/{moment}/max_allocated/{device}"] for moment in moments]
                assert peaks == sorted(peaks)
                assert peaks[-1] >= max(m[f"memory/{infix}/{moment}/allocated/{device}"] for moment in moments)
                fraction = m[f"memory/{infix}/end/onload/max_allocated_frac/{device}"]
                assert 0 < fraction < 1

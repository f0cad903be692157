"""The catalogue is consistent, finds what runs emit, and is what the documentation says."""

import importlib.util
from pathlib import Path

import pytest

from megarl.metrics import registry
from megarl.metrics.catalogue import Metric
from megarl.metrics.meter import Meter
from megarl.metrics.registry import METRICS, canonical, check, check_meter, expand, find
from megarl.metrics.values import KINDS

ROOT = Path(__file__).parents[2]
DIALECTS = ("roll", "verl", "trinity")
# a second spelling of veRL's, and one that only the view `all` has
OTHERS = ("verl-core", "base")


def test_every_metric_has_one_name_a_known_reduction_and_a_sentence():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.reduction in {*KINDS, "derived"}, metric.name
        assert metric.doc.endswith("."), metric.name
        assert set(metric.aliases) <= {*DIALECTS, *OTHERS}, metric.name


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_two_metrics_share_a_spelling(dialect):
    spellings = [metric.aliases.get(dialect, metric.name) for metric in METRICS]
    assert len(spellings) == len(set(spellings))


def test_no_alias_is_another_metrics_name():
    assert not {alias for metric in METRICS for alias in metric.aliases.values()} & {metric.name for metric in METRICS}


def test_families_expand_in_parallel():
    family = Metric("a/{mean,max}", "{mean,max}", "1", "The {mean,largest} of {task}.", {"roll": "b/{mean,max}"})
    assert expand(family) == [
        Metric("a/mean", "mean", "1", "The mean of {task}.", {"roll": "b/mean"}),
        Metric("a/max", "max", "1", "The largest of {task}.", {"roll": "b/max"}),
    ]
    with pytest.raises(ValueError, match="must have one length"):
        expand(Metric("a/{mean,max}", "{mean,max,min}", "1", "."))


def test_templates_fill_names_and_aliases():
    found = find("eval/openai/gsm8k/score/mean@4")
    assert found is not None
    assert found.aliases == {
        "verl": "val/test_score/openai/gsm8k",
        "verl-core": "val-core/openai/gsm8k/reward/mean@4",
        "base": "eval/openai/gsm8k/score",
    }
    detailed = check("eval/dummy/accuracy/std@2/max")
    assert (detailed.name, detailed.aliases) == ("eval/dummy/accuracy/std@2/max", {})
    assert check("memory/actor_train/train_step/end/onload/max_reserved_frac/15").reduction == "gauge"
    assert check("time/actor_train/train_step/skew").reduction == "span"
    assert check("memory/cpu/critic/compute_values/end/rss").unit == "GiB"
    assert find("eval/gsm8k/score/mean@k") is None
    assert find("time/train_step/total") is None


def test_unknown_names_are_refused_with_a_hint_and_logged_under_user():
    with pytest.raises(ValueError, match=r"'actor/pg_los' is not in the catalogue\. Close: actor/pg_loss"):
        check("actor/pg_los")
    assert canonical("format_score") == "user/format_score"
    assert canonical("user/format_score") == "user/format_score"
    assert canonical("actor/pg_loss") == "actor/pg_loss"


def test_a_meter_that_uses_another_kind_than_documented_is_refused():
    meter = Meter()
    meter.loss("actor/pg_loss", 1.0)
    meter.span("time/actor_train/train_step", 0.0, 1.0, 0.0, 1.0)
    meter.last("perf/throughput", 3.0)
    check_meter(meter)
    meter.sum("actor/entropy", 1.0)
    with pytest.raises(ValueError, match="'actor/entropy' is documented as mean but collected as sum"):
        check_meter(meter)


def test_the_document_has_every_metric():
    spec = importlib.util.spec_from_file_location("metrics_reference", ROOT / "tools/metrics_reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    document = reference.DOCUMENT.read_text()
    assert reference.rewritten(document) == document, "run: python tools/metrics_reference.py"
    missing = [metric.name for metric in METRICS if f"`{metric.name}`" not in document]
    assert not missing


# What a GRPO or PPO run with an evaluation emits.
EMITTED = """
training/global_step training/epoch critic/score/mean critic/rewards/min critic/advantages/max critic/returns/mean
critic/values/mean critic/old_log_prob/mean critic/ref_log_prob/mean critic/vf_loss critic/vf_clipfrac critic/vpred_mean
critic/error critic/vf_explained_var critic/lr critic/grad_norm critic/grad_norm_max critic/skipped_updates
actor/pg_loss actor/kl_loss actor/kl_coef actor/total_loss actor/entropy actor/entropy_update actor/pg_clipfrac
actor/pg_clipfrac_lower actor/ppo_kl actor/approxkl actor/ratio_mean actor/ratio_max actor/ratio_min
actor/ppo_ratio_clipfrac actor/ppo_ratio_high_clipfrac actor/ppo_ratio_low_clipfrac actor/lr actor/grad_norm
actor/grad_norm_max actor/skipped_updates actor/sft_loss response_length/mean response_length/clip_ratio
response/aborted_ratio prompt_length/max perf/total_num_tokens perf/num_response_tokens
perf/throughput perf/time_per_step
perf/cpu_memory_used_gb perf/max_memory_allocated_gb perf/max_memory_reserved_gb system/samples system/tps timing_s/gen
timing_s/reward timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv timing_s/update_actor
timing_s/update_critic timing_s/update_weights timing_s/testing timing_s/step timing_s/step_wall
timing_s/generate_sequences timing_per_token_ms/gen timing_per_token_ms/ref timing_per_token_ms/values
timing_per_token_ms/adv timing_per_token_ms/update_critic timing_per_token_ms/update_actor
timing_per_token_ms/old_log_prob time/actor_train/train_step/total time/critic/compute_values/skew
memory/cpu/actor_infer/generate/start/vms eval/gsm8k/score/mean@1 eval/gsm8k/score/std@4 eval/gsm8k/score/best@2
eval/gsm8k/score/worst@4 val/score/mean mismatch/logprob_gap_mean mismatch/logprob_gap_max mismatch/k3_kl
experience_pipeline/experience_count experience_pipeline/group_advantages/reward_mean/mean
experience_pipeline/group_advantages/reward_std/max rollout/zero_variance_group_ratio weights/version weights/push_bytes
"""


@pytest.mark.parametrize("name", EMITTED.split())
def test_names_of_the_seeds_are_known(name):
    assert registry.check(name).name == name

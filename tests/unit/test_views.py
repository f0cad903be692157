"""Names of the dialects, of single phases and of many devices; values never change on the way."""

from __future__ import annotations

import pytest

from megarl.trackers.views import Spelling

PHASES = ["actor_train/train_step", "critic/train_step", "critic/compute_values", "actor_infer/generate"]
STEP = {
    "critic/vf_loss": 0.5,
    "actor/ppo_kl": 0.25,
    "actor/entropy": 0.125,
    "timing_s/gen": 2.0,
    "eval/openai/gsm8k/score/mean@4": 0.75,
    "eval/openai/gsm8k/score/best@4": 1.0,
    "rollout/accuracy/mean": 0.5,
    "time/critic/compute_values/total": 3.0,
    "time/critic/train_step/total": 4.0,
    "memory/cpu/critic/compute_values/end/rss": 0.5,
    "training/global_step": 7.0,
}


def test_native_has_every_quantity_once() -> None:
    assert Spelling(["native"], PHASES).spell(STEP) == STEP


def test_a_dialect_replaces_names_and_keeps_the_rest() -> None:
    roll = Spelling(["roll"], PHASES).spell(STEP)
    assert roll["critic/loss"] == 0.5
    assert roll["actor/policykl"] == 0.25
    assert roll["time/rollout"] == 2.0
    assert "critic/vf_loss" not in roll
    assert roll["eval/openai/gsm8k/score/mean@4"] == 0.75
    verl = Spelling(["verl"], PHASES).spell(STEP)
    assert verl["val/test_score/openai/gsm8k"] == verl["val-core/openai/gsm8k/reward/mean@4"] == 0.75
    assert "eval/openai/gsm8k/score/mean@4" not in verl
    assert verl["critic/vf_loss"] == 0.5
    trinity = Spelling(["trinity"], PHASES).spell(STEP)
    assert trinity["time/gen"] == 2.0


def test_several_views_give_the_names_of_each() -> None:
    both = Spelling(["native", "roll"]).spell(STEP)
    assert both["critic/vf_loss"] == both["critic/loss"]


def test_all_has_every_spelling_and_at_signs_survive() -> None:
    names = Spelling(["all"], PHASES).spell(STEP)
    assert STEP.items() <= names.items()
    assert names["critic/entropy/mean"] == 0.125
    assert names["rollout/accuracy"] == 0.5
    assert names["eval/openai/gsm8k/score"] == 0.75
    assert names["eval/openai/gsm8k/score/best@4"] == 1.0


def test_a_phase_of_one_cluster_has_a_bare_name_too() -> None:
    names = Spelling(["all"], PHASES).spell(STEP)
    assert names["time/compute_values/total"] == 3.0
    assert names["memory/cpu/compute_values/end/rss"] == 0.5
    assert "time/train_step/total" not in names


def test_whole_numbers_are_written_as_such_and_strangers_go_under_user() -> None:
    spelled = Spelling(["native"]).spell({"training/global_step": 7.0, "actor/lr": 1.0, "mine": 3})
    assert [type(value) for value in spelled.values()] == [int, float, int]
    assert "user/mine" in spelled


@pytest.mark.parametrize(("num_devices", "max_devices"), [(17, 16), (2, 0)])
def test_many_devices_are_summed_up(num_devices: int, max_devices: int) -> None:
    stem = "memory/actor_train/train_step/end/onload/max_allocated"
    step = {f"{stem}/{device}": float(device % 10) for device in range(num_devices)}
    found = Spelling(["native"], max_devices=max_devices).spell(step | {"actor/lr": 0.5})
    readings = list(step.values())
    assert found == {
        "actor/lr": 0.5,
        f"{stem}/max": max(readings),
        f"{stem}/min": 0.0,
        f"{stem}/mean": pytest.approx(sum(readings) / len(readings)),
        f"{stem}/argmax": readings.index(max(readings)),
    }


def test_sixteen_devices_are_shown_one_by_one() -> None:
    step = {f"memory/actor_infer/generate/end/onload/reserved/{device}": 1.0 for device in range(16)}
    assert Spelling(["native"]).spell(step) == step

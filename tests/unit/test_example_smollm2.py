"""The sums of examples/smollm2: what is asked, what is held out, and what earns a reward."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from examples.smollm2.arithmetic import LARGEST_ADDEND, NUM_HELD_OUT, SHOWN, right_sum, row, split_sums, write_rows
from examples.smollm2.show_steps import table
from megarl.core.sample import Prompt, Sample
from megarl.rewards.load import load_reward

DIRECTORY = Path(__file__).parents[2] / "examples" / "smollm2"


def test_held_out_sums_are_never_trained_on() -> None:
    train, held_out = split_sums(NUM_HELD_OUT, seed=0)
    assert len(held_out) == NUM_HELD_OUT
    assert not set(train) & set(held_out)
    # every pair but the one that the prompt solves; the other shown sum has larger addends
    assert len({*train, *held_out}) == len(train) + len(held_out) == LARGEST_ADDEND**2 - 1
    assert not {*train, *held_out} & set(SHOWN)
    assert (train, held_out) == split_sums(NUM_HELD_OUT, seed=0)
    assert train != split_sums(NUM_HELD_OUT, seed=1)[0]


def test_a_row_asks_for_the_sum_and_does_not_tell_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "sums.jsonl", [(8, 9), (20, 20)])
    first, second = (json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines())
    assert first == {"id": "8+9", "prompt": "3 + 4 = 7\n25 + 31 = 56\n8 + 9 =", "answer": "17"}
    assert second["answer"] == "40"
    assert first == row((8, 9))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (" 17\n10", 1.0),
        ("17", 1.0),
        (" 17.", 1.0),
        (" = 17", 1.0),
        (" 18\n17", 0.0),
        (" 170", 0.0),
        (" 017", 0.0),
        (" 1 7", 0.0),
        (" -17", 0.0),
        (" 17.5", 0.0),
        (" seventeen", 0.0),
        (" \u0661\u0667", 0.0),  # 17 in digits that are not asked for
        ("", 0.0),
    ],
)
def test_only_the_first_number_counts(response: str, reward: float) -> None:
    prompt = Prompt(id="8+9", text="8 + 9 =", token_ids=np.array([1]), answer="17")
    sample = Sample(np.array([1]), np.zeros(1, dtype=np.int8), np.zeros(1, dtype=np.float32), "stop", response)
    assert right_sum(prompt, sample) == reward


def test_the_configuration_names_the_reward() -> None:
    settings = yaml.safe_load((DIRECTORY / "train.yaml").read_text())["reward"]
    assert load_reward(settings["name"], {}).function is right_sum


def test_table_of_steps() -> None:
    lines = [
        '{"step": 0, "metrics": {"eval/held_out/score/mean@1": 0.25}}',
        '{"step": 1, "metrics": {"critic/score/mean": 0.5, "timing_s/step": 51.44}}',
    ]
    cells = [line.split() for line in table(lines).splitlines()]
    assert cells[1:] == [["0", "-", "0.25", "-", "-", "-"], ["1", "0.5", "-", "-", "-", "51.4"]]

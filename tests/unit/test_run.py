"""The parts of a run that decide without computing: schedules, dealing, residency, directories, the summary."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.core.errors import RunDirInUseError
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.fleet.inprocess import deal
from megarl.metrics.meter import Meter
from megarl.metrics.values import Span
from megarl.run.directory import claim
from megarl.run.residency import Residency
from megarl.run.summary import History, format_summary

CONFIGS = Path(__file__).parents[2] / "configs"


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_every_request_is_dealt_once_and_groups_stay_together(prompts: list[int], num_engines: int) -> None:
    params = SamplingParams(max_new_tokens=1)
    requests = [GenerationRequest(str(i), np.array([p]), i, params) for i, p in enumerate(prompts)]
    hands = deal(requests, num_engines)
    assert sorted(i for hand in hands for i in hand) == list(range(len(prompts)))
    engine_of = {i: engine for engine, hand in enumerate(hands) for i in hand}
    fair_share = -(-len(prompts) // num_engines)
    for _, run in groupby(range(len(prompts)), key=lambda i: prompts[i]):
        group = list(run)
        # a group is cut only where it passes an engine's fair share
        cuts = sum(engine_of[a] != engine_of[b] for a, b in pairwise(group))
        assert cuts <= (len(group) - 1) // fair_share
    if len(set(prompts)) == 1:
        assert max(map(len, hands)) == fair_share


class Part:
    """Memory that only keeps count of its moves."""

    num_bytes = 0

    def __init__(self, log: list[str], name: str) -> None:
        self.resident = True
        self._log, self._name = log, name

    def offload(self) -> None:
        assert self.resident
        self.resident = False
        self._log.append(f"-{self._name}")

    def onload(self) -> None:
        assert not self.resident
        self.resident = True
        self._log.append(f"+{self._name}")


def test_a_phase_moves_only_what_it_must_and_offloads_first() -> None:
    log: list[str] = []
    parts = {name: Part(log, name) for name in ("a", "b", "c", "pinned")}
    table = {"x/1": frozenset({"a"}), "x/2": frozenset({"a", "b"}), "x/3": frozenset({"c"})}
    residency = Residency(parts, frozenset({"pinned"}), table, torch.device("cpu"))
    meter = Meter()
    moves = []
    for phase in ("x/1", "x/2", "x/2", "elsewhere/0", "x/3"):
        with residency.phase(phase, meter):
            moves.append(log.copy())
            log.clear()
    residency.settle(["x/1", "x/2", "elsewhere/0"])
    moves.append(log.copy())
    assert moves == [["-b", "-c"], ["+b"], [], [], ["-a", "-b", "+c"], ["-c"]]
    assert {name for name, value in meter.statistics.items() if isinstance(value, Span)} == {
        "time/x/1", "time/x/2", "time/x/3", "time/elsewhere/0",
    }  # fmt: skip


def test_a_phase_that_fails_is_recorded_and_leaves_a_usable_state() -> None:
    log: list[str] = []
    parts = {name: Part(log, name) for name in ("a", "b")}
    residency = Residency(parts, frozenset(), {"x/1": frozenset({"a"}), "x/2": frozenset({"b"})}, torch.device("cpu"))
    meter = Meter()
    with pytest.raises(ZeroDivisionError), residency.phase("x/1", meter):
        raise ZeroDivisionError
    assert "time/x/1" in meter.statistics
    with residency.phase("x/2", meter):
        assert (parts["a"].resident, parts["b"].resident) == (False, True)


def test_a_run_directory_has_one_owner_and_old_runs_are_kept(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "quickstart.yaml", [f"run.dir={tmp_path}"])
    first = claim(config, fresh=False)
    (first.path / "metrics.jsonl").write_text("first")
    with pytest.raises(RunDirInUseError, match="MRL-6001"):
        claim(config, fresh=True)
    first.release()
    second = claim(config, fresh=True)
    (second.path / "metrics.jsonl").write_text("second")
    second.release()
    claim(config, fresh=False).release()
    assert (tmp_path / "quickstart" / "metrics.jsonl").read_text() == "second"
    third = claim(config, fresh=True)
    third.begin(config)
    third.release()
    assert (tmp_path / "quickstart.1" / "metrics.jsonl").read_text() == "first"
    assert (tmp_path / "quickstart.2" / "metrics.jsonl").read_text() == "second"
    assert load_config(tmp_path / "quickstart" / "resolved.yaml") == config


def test_the_summary_compares_the_end_with_the_start_of_the_algorithm() -> None:
    history = History()
    for step, score in ((0, 0.0), (5, 0.25), (10, 0.875)):
        metrics = {"eval/openai/gsm8k/score/mean@2": score, "timing_s/step_wall": 2.0, "time/a/b/total": 1.0}
        history.add(step, "main", metrics)
    text = format_summary(history, Path("runs/x"), warmup_steps=5)
    assert "openai/gsm8k:   25.0% before (step 5)  ->    87.5% after (step 10)   +62.5 points" in text
    assert "runs/x" in text
    assert "a/b" in text

"""The closing summary: did it learn, where did the time go, where are the results."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megarl.trackers.ledger import StepRecord

_TOTAL_OF_PHASE = re.compile(r"time/([^/]+/[^/]+)/total")


class History:
    """What the summary needs of the steps; a few numbers per step."""

    def __init__(self, records: Iterable[StepRecord] = (), warmup_steps: int = 0) -> None:
        """Begins with the steps that are in a ledger already."""
        # eval name -> [(step, value)]
        self.scores: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.phase_seconds: dict[str, float] = defaultdict(float)
        self.num_generated = 0.0
        self.generation_seconds = 0.0
        self.num_trained = 0.0
        self.training_seconds = 0.0
        self.wall_seconds = 0.0
        self.warmup_loss: float | None = None
        for record in records:
            self.add(record.step, "warmup" if 0 < record.step <= warmup_steps else "main", record.metrics)

    def add(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        """Take one step's metrics in."""
        for name, value in metrics.items():
            if name.startswith("eval/") and "/score/mean@" in name:
                self.scores[name.removeprefix("eval/").split("/score/")[0]].append((step, value))
            # Step 0 is before the clock of the steps starts.
            if step > 0 and (phase := _TOTAL_OF_PHASE.fullmatch(name)):
                self.phase_seconds[phase[1]] += value
        self.wall_seconds += metrics.get("timing_s/step_wall", 0.0)
        num_tokens = metrics.get("perf/total_num_tokens", 0.0)
        if "timing_s/gen" in metrics:
            self.num_generated += metrics.get("perf/num_response_tokens", 0.0)
            self.generation_seconds += metrics["timing_s/gen"]
        if "timing_s/update_actor" in metrics:
            self.num_trained += num_tokens
            self.training_seconds += metrics["timing_s/update_actor"]
        if stage == "warmup":
            self.warmup_loss = metrics.get("actor/sft_loss", self.warmup_loss)


def format_summary(history: History, directory: Path, warmup_steps: int) -> str:
    """The text that a run ends with."""
    lines = ["", "Summary"]
    for name, scores in history.scores.items():
        before = next((entry for entry in scores if entry[0] >= warmup_steps), scores[0])
        after = scores[-1]
        change = 100 * (after[1] - before[1])
        lines.append(
            f"  {name}: {before[1]:7.1%} before (step {before[0]})  ->  {after[1]:7.1%} after (step {after[0]})"
            f"   {change:+.1f} points"
        )
    if history.warmup_loss is not None:
        lines.append(f"  warm-up ended with a loss of {history.warmup_loss:.4f} per token")
    if history.phase_seconds:
        lines.append("  Time per phase (slowest rank)")
        total = max(history.wall_seconds, 1e-9)
        width = max(map(len, history.phase_seconds))
        for phase, seconds in sorted(history.phase_seconds.items(), key=lambda item: -item[1]):
            lines.append(f"    {phase:<{width}}  {seconds:8.1f} s  {seconds / total:6.1%}  {_bar(seconds / total)}")
        lines.append(f"    {'all steps':<{width}}  {history.wall_seconds:8.1f} s")
    rates = []
    if history.generation_seconds > 0:
        rates.append(f"generation {history.num_generated / history.generation_seconds:,.0f} tokens/s")
    if history.training_seconds > 0:
        rates.append(f"training {history.num_trained / history.training_seconds:,.0f} tokens/s")
    if rates:
        lines.append(f"  Speed: {', '.join(rates)}")
    lines.append(f"  Run directory: {directory}")
    return "\n".join(lines)


def _bar(share: float) -> str:
    return "#" * round(30 * share)

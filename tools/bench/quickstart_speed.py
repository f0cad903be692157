"""Speed of the quickstart on this machine: ``python tools/bench/quickstart_speed.py``.

Runs the quickstart with GRPO and with PPO for a few steps each, alternated, and prints medians and spreads of tokens
per second for generation and for training (whole machine, the driver's clock). Compare ratios, not figures of other
machines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROUNDS = 3
OVERRIDES = ("warmup.num_steps=40", "run.num_steps=8", "eval.sets={}", "eval.every=0")


def run(config: str, directory: Path) -> list[dict[str, float]]:
    """The metrics of one run's steps, without the first of each stage."""
    command = [sys.executable, "-m", "megarl", "train", f"configs/{config}.yaml", f"run.dir={directory}", *OVERRIDES]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (directory / config / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line)["metrics"] for line in lines]
    return [record for record in records if record["training/global_step"] not in (1, 41)]


def rates(records: list[dict[str, float]]) -> dict[str, float]:
    """Tokens per second of one run, by kind of work."""
    work = {
        "generation (sampled tokens)": ("perf/num_response_tokens", "timing_s/gen"),
        "log-probs": ("perf/total_num_tokens", "timing_s/old_log_prob"),
        "actor update": ("perf/total_num_tokens", "timing_s/update_actor"),
        "critic update": ("perf/total_num_tokens", "timing_s/update_critic"),
        "whole step": ("perf/total_num_tokens", "timing_s/step"),
    }
    found = {}
    for name, (tokens, seconds) in work.items():
        rows = [record for record in records if seconds in record and "timing_s/gen" in record]
        if rows:
            found[name] = sum(row[tokens] for row in rows) / sum(row[seconds] for row in rows)
    supervised = [record for record in records if "timing_s/gen" not in record]
    found["supervised step"] = sum(row["perf/total_num_tokens"] for row in supervised) / sum(
        row["timing_s/step"] for row in supervised
    )
    return found


def main() -> None:
    measured: dict[str, dict[str, list[float]]] = {"quickstart": {}, "quickstart_ppo": {}}
    for number in range(ROUNDS):
        for config, table in measured.items():
            with tempfile.TemporaryDirectory() as directory:
                for name, rate in rates(run(config, Path(directory))).items():
                    table.setdefault(name, []).append(rate)
            print(f"round {number + 1} of {ROUNDS}: {config} done", file=sys.stderr)
    print(f"{'':44} median tokens/s   lowest-highest of {ROUNDS}")
    for config, table in measured.items():
        for name, values in table.items():
            spread = f"{min(values):,.0f}-{max(values):,.0f}"
            print(f"{config:15} {name:28} {statistics.median(values):15,.0f}   {spread}")


if __name__ == "__main__":
    main()

"""The results of an evaluation as a table for people."""

from __future__ import annotations

from collections.abc import Mapping

_HEADER = ("set", "score", "k", "prompts", "mean@k", "best@k", "worst@k", "std@k")


def evaluation_table(metrics: Mapping[str, float], counts: Mapping[str, tuple[int, int]]) -> str:
    """One row for each set, and one for each of its named scores. ``counts`` are prompts and samples per prompt."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for name, (num_prompts, k) in counts.items():
        prefix = f"bench/{name}/"
        means = [key for key in metrics if key.startswith(prefix) and key.endswith(f"/mean@{k}")]
        scores = [key.removeprefix(prefix).removesuffix(f"/mean@{k}") for key in means]
        for score in sorted(scores, key=lambda score: (score != "score", score)):
            value = {statistic: metrics.get(f"{prefix}{score}/{statistic}@{k}") for statistic in
                     ("mean", "best", "worst", "std", "stderr")}  # fmt: skip
            error = "" if value["stderr"] is None else f" ± {value['stderr']:.4f}"
            cells = [_shown(value[statistic]) for statistic in ("best", "worst", "std")]
            is_first = score == "score"
            row = (name if is_first else "", score, str(k), f"{num_prompts:,}", _shown(value["mean"]) + error, *cells)
            rows.append(row)
        failed = metrics.get(f"{prefix}failed_runs", 0)
        if failed:
            rows.append(("", f"{failed:g} failed", "", "", "", "", "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

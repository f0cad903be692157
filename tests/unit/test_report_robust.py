"""Whatever stands in the files of a run, there is a report, or one clear error."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.core.errors import MissingInputError
from megarl.report.write import write_report
from tests.unit.report_runs import encode, line

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["NaN", "Infinity", 1e308, -1e308, 2**62])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "timing_s/step_wall", "time/a/b/total", "time/a/b/execute", "critic/score/mean", "eval/x/score/mean@1",
        "alerts/H01", "memory/a/b/end/onload/max_reserved/0", "memory/a/b/end/onload/max_reserved/9",
        "perf/total_num_tokens", "perf/max_memory_reserved_gb", "user/mine",
    ]
)  # fmt: skip
ALERTS = st.lists(st.fixed_dictionaries({"rule": LEAVES, "severity": LEAVES, "message": LEAVES}) | JSON, max_size=2)
STEPS = st.builds(
    lambda step, metrics, alerts, meta: line(step, metrics, alerts=alerts, meta=meta),
    st.integers(-5, 50),
    st.dictionaries(NAMES, LEAVES, max_size=6),
    ALERTS,
    JSON,
)
SEGMENT = st.tuples(st.integers(0, 70), st.text(max_size=3), st.sampled_from(["onload", "execute"]), LEAVES, LEAVES)
TIMELINE = st.fixed_dictionaries(
    {"step": st.integers(0, 9), "segments": st.lists(SEGMENT.map(list) | JSON, max_size=4)}
)
SAMPLE = st.fixed_dictionaries(
    {
        "token_ids": st.lists(st.integers(-1, 70), max_size=3),
        "loss_mask": st.lists(st.integers(0, 1), max_size=3),
        "rollout_logprobs": st.lists(LEAVES, max_size=3),
        "token_advantages": st.lists(st.floats(), max_size=3),
        "reward": LEAVES,
        "advantage": LEAVES,
    }
)
GROUP = st.fixed_dictionaries(
    {
        "group": st.integers(0, 2),
        "prompt": st.just({"text": "1="}) | JSON,
        "samples": st.lists(SAMPLE, max_size=2) | JSON,
    }
)
DEVICE = st.fixed_dictionaries({"device": LEAVES, "total_gib": LEAVES, "name": LEAVES})
ODD_SAMPLE: dict[str, Any] = {
    "token_ids": encode("1=2"), "loss_mask": [0, 0, 1], "rollout_logprobs": [0.0, 0.0, float("nan")], "reward": "x",
}  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(
    st.lists(STEPS | JSON, min_size=1, max_size=4),
    st.lists(TIMELINE | JSON, max_size=2),
    st.lists(GROUP | JSON, max_size=2),
    st.lists(DEVICE | JSON, max_size=2) | JSON,
)
@example([line(1, {"a": 1.0})], [], [{"group": 0, "prompt": {"text": "1="}, "samples": [ODD_SAMPLE]}], [])
@example([line(1, {"timing_s/step_wall": 1e308}), line(2, {"timing_s/step_wall": 1e308})], [], [], [])
@example([line(1, {"memory/a/b/end/onload/max_reserved/0": 10**400})], [], [], [{"device": 0, "total_gib": 10**400}])
def test_odd_files_make_a_report_or_one_clear_error(
    steps: list[Any], timeline: list[Any], groups: list[Any], devices: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        (run / "samples").mkdir()
        _write_lines(run / "metrics.jsonl", steps)
        _write_lines(run / "timeline.jsonl", timeline)
        _write_lines(run / "samples" / "step_000001.jsonl", groups)
        (run / "devices.json").write_text(json.dumps(devices))
        (run / "resolved.yaml").write_text("model: {tokenizer: 'builtin:characters'}\n")
        try:
            assert write_report(run).read_text(encoding="utf-8").endswith("</html>\n")
        except MissingInputError as error:
            assert error.code == "MRL-4902"  # not one of the lines was a step


def _write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

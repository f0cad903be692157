"""The page: complete, self-contained, harmless, and made by one command."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import megarl.report
from megarl.cli import main
from megarl.report.curves import CURVES, curves_for, describe
from megarl.report.headline import duration
from megarl.report.page import SECTIONS
from megarl.report.write import write_report
from tests.unit.report_runs import line, make_run, write_ledger

ASSETS = Path(megarl.report.__file__).parent / "assets"
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "formaction", "ping", "cite"}


class Parts(HTMLParser):
    """Tags with their attributes, and the text of every script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", text))


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", num_steps=40, num_devices=4)


def test_the_page_loads_nothing(run: Path) -> None:
    text = write_report(run).read_text()
    assert re.search(r"https?:|//[a-z]+\.[a-z]", text) is None
    parts = Parts(text)
    for tag, attributes in parts.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "video", "audio", "source")
        for name in LOADING & attributes.keys():
            assert (attributes[name] or "").startswith("#"), (tag, attributes)
    styles = "".join(content for tag, content in parts.texts if tag == "style")
    assert "@import" not in styles
    assert "url(" not in styles


def test_only_the_pages_own_scripts_may_run(run: Path) -> None:
    parts = Parts(write_report(run).read_text())
    policy = next(a["content"] for tag, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert policy.endswith("img-src data:")
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    scripts = re.findall(r"<script>(.*?)</script>", write_report(run).read_text(), re.DOTALL)
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    assert [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts] == allowed


def test_the_vendored_script_is_the_published_one() -> None:
    """uPlot 1.6.32, byte for byte; its licence goes with it, into every page as well."""
    digest = hashlib.sha256((ASSETS / "uplot" / "uPlot.iife.min.js").read_bytes()).hexdigest()
    assert digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    assert "MIT" in (ASSETS / "uplot" / "LICENSE").read_text()


def test_all_assets_are_packaged() -> None:
    root = Path(megarl.report.__file__).parents[2]
    assert "recursive-include megarl/report/assets *" in (root / "MANIFEST.in").read_text()
    assert '"megarl.report": ["assets/*", "assets/uplot/*"]' in (root / "setup.py").read_text()


def test_every_section_is_in_the_page(run: Path) -> None:
    ids = {attributes.get("id") for _, attributes in Parts(write_report(run).read_text()).tags}
    assert {name for name, _ in SECTIONS} - ids == {"comparison"}


def test_foreign_text_cannot_leave_the_data(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    write_ledger(tmp_path / evil.replace("/", "_"), [line(1, {evil: 1.0}, run_id=evil)])
    (directory,) = tmp_path.iterdir()
    text = write_report(directory).read_text()
    assert "alert(1)" not in re.sub(
        r"<script type=.application/json.*?</script>|<title>.*?</title>", "", text, flags=re.DOTALL
    )
    assert "<script>alert" not in text
    assert data_of(directory / "report.html")["runs"][0]["run_id"] == evil


def test_names_that_are_no_text_are_written_anyhow(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"run\xff")
    write_ledger(run, [line(1, {"a\ud800": 1.0})])
    assert "<title>run&#56575; - megarl" in write_report(run).read_text(encoding="utf-8")


def test_the_headline_of_a_run(run: Path) -> None:
    tiles = {tile["label"]: tile for tile in data_of(write_report(run))["runs"][0]["tiles"]}
    assert list(tiles) == [
        "Evaluation: gsm8k", "Training score", "Steps", "Tokens per second", "Largest phase", "Peak memory", "Alerts",
    ]  # fmt: skip
    assert tiles["Evaluation: gsm8k"]["value"] == pytest.approx(0.895, abs=0.001)
    assert "since step 0" in tiles["Evaluation: gsm8k"]["detail"]
    assert tiles["Steps"]["value"] == 40
    assert tiles["Largest phase"]["detail"].startswith("actor_")
    assert tiles["Peak memory"]["tone"] == "warning"
    assert "device 1 in actor_train/train_step" in tiles["Peak memory"]["detail"]
    assert tiles["Alerts"]["tone"] == "critical"


def test_changes_count_from_the_end_of_the_warmup(tmp_path: Path) -> None:
    scores = {0: 0.0, 200: 0.4, 240: 0.9}
    write_ledger(tmp_path, [line(step, {"eval/sums/score/mean@1": score}) for step, score in scores.items()])
    (tmp_path / "resolved.yaml").write_text("run: {name: x}\nwarmup: {num_steps: 200}\n")
    tile = data_of(write_report(tmp_path))["runs"][0]["tiles"][0]
    assert tile["detail"] == "+50.0 points since step 200, best 90.0 %"


def test_scores_beyond_one_are_no_percentages(tmp_path: Path) -> None:
    write_ledger(tmp_path, [line(step, {"eval/x/score/mean@1": 1.5 * step}) for step in range(3)])
    tile = data_of(write_report(tmp_path))["runs"][0]["tiles"][0]
    assert (tile["value"], tile["unit"], tile["detail"]) == (3, "score", "+3 since step 0, best 3")


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", num_steps=20, num_devices=4, lr=3e-6)
    data = data_of(write_report(run, tmp_path / "both.html", other))
    assert [one["name"] for one in data["runs"]] == ["demo", "other"]
    rows = {row["label"]: row for row in data["comparison"]["numbers"]}
    assert rows["Steps"]["difference"] == -20
    settings = {name: values for name, *values in data["comparison"]["settings"]}
    assert settings == {
        "run.name": ["demo", "other"],
        "run.num_steps": ["40", "20"],
        "actor.optimizer.lr": ["1.0e-06", "3.0e-06"],
    }


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for place in ("mine", "yours"):
        write_ledger(tmp_path / place / "run", [line(1, {"a": 1.0})])
    data = data_of(write_report(tmp_path / "mine" / "run", other=tmp_path / "yours" / "run"))
    assert [one["name"] for one in data["runs"]] == ["mine/run", "yours/run"]


def test_a_run_with_itself_differs_in_nothing(run: Path, tmp_path: Path) -> None:
    comparison = data_of(write_report(run, tmp_path / "same.html", run))["comparison"]
    assert comparison["settings"] == []
    assert {row["difference"] for row in comparison["numbers"]} == {0}


def test_odd_devices_are_passed_over(tmp_path: Path) -> None:
    write_ledger(tmp_path, [line(1, {"memory/a/b/end/onload/max_reserved/0": 5.0})])
    rows = '[{"device": 0, "total_gib": NaN, "name": "x"}, 3, {"device": "a", "total_gib": 8}, {"uuid": [1]}]'
    (tmp_path / "devices.json").write_text(rows)
    page = data_of(write_report(tmp_path))["runs"][0]
    assert page["devices"] == [{"device": 0, "name": "x"}, {"device": "a", "total_gib": 8}, {}]
    assert page["capacity"] == {}
    assert page["tiles"][-2] == {
        "label": "Peak memory",
        "unit": "GiB",
        "detail": "device 0 in a/b",
        "tone": "",
        "value": 5,
    }


def test_curves_are_those_that_the_run_has() -> None:
    names = ["critic/score/mean", "eval/openai/gsm8k/score/mean@4", "response_length/max", "user/mine"]
    assert [(curve["title"], curve["names"]) for curve in curves_for(names)] == [
        ("Score", ["eval/openai/gsm8k/score/mean@4", "critic/score/mean"]),
        ("Response length", ["response_length/max"]),
    ]


def test_curves_name_metrics_that_exist() -> None:
    filled = [name.replace("eval/*", "eval/x").replace("@*", "@1") for curve in CURVES for name in curve.names]
    unknown = [name for name in filled if describe(name) is None]
    assert unknown == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0312, "0.0312 s"), (75.4, "75.4 s"), (250, "4 min 10 s"), (11_520, "3 h 12 min"), (187_200 * 2, "4 d 8 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").is_file()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_a_directory_without_a_ledger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 66
    told = capsys.readouterr().err
    assert told.startswith("MRL-4901 nothing/metrics.jsonl cannot be read")
    assert "runs/NAME" in told


def test_a_page_that_cannot_be_written_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--out", "/dev/null/page.html"]) == 74
    assert "MRL-7901" in capsys.readouterr().err


def test_the_command_needs_no_torch(run: Path) -> None:
    program = "import sys; from megarl.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program, "report", str(run)], check=True, capture_output=True)

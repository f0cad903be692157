"""The report in a real browser: everything is drawn, nothing fails, nothing is fetched, and its controls work."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.cli import main
from megarl.report.page import SECTIONS
from tests.e2e.runs import QUICKSTART, ROOT, SHORT, train
from tests.unit.report_runs import KINDS, encode, line, make_run, write_ledger


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("screenshot", ROOT / "tools" / "screenshot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
opened = TOOL.opened
Page = Any  # the tool's class, which mypy cannot see
pytestmark = pytest.mark.skipif(
    TOOL.find_chromium() is None, reason="no Chromium here; on Debian: apt install chromium"
)

# what the made-up run has of the table in `report.curves`
NUM_CURVES = 20


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "demo", num_steps=60, num_devices=4, kinds=KINDS)
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def shared_page(report: Path) -> Iterator[Page]:
    with opened(report, height=4000) as page:
        yield page


@pytest.fixture
def page(shared_page: Page) -> Iterator[Page]:
    yield shared_page
    assert shared_page.run("document.body.dataset.errors") is None


def count(page: Page, selector: str) -> int:
    number = page.run(f"document.querySelectorAll({selector!r}).length")
    assert isinstance(number, int)
    return number


def click(page: Page, text: str, inside: str) -> None:
    page.run(f"[...document.querySelectorAll('{inside} button')].find((b) => b.textContent === {text!r}).click()")


def test_every_section_is_there_and_filled(page: Page) -> None:
    for name, title in SECTIONS:
        if name != "comparison":
            assert page.run(f"document.querySelector('#{name} h2').textContent") == title
            assert count(page, f"#{name} .content > *") > 0
            assert count(page, f"#{name} .missing") == 0, name
    assert count(page, "#tiles .tile") == 7


def test_every_chart_is_drawn(page: Page) -> None:
    assert count(page, "#curves canvas") == NUM_CURVES
    assert count(page, "#step-time canvas") == 1
    assert count(page, "#memory canvas") == 1
    painted = """[...document.querySelectorAll('canvas')].every((canvas) => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(pixels).size > 10;
    })"""
    assert page.run(painted) is True


def test_timeline_has_a_row_per_rank_and_other_steps(page: Page) -> None:
    assert count(page, "#timeline .idle") == 4
    before = page.run("document.querySelector('#timeline svg').getAttribute('aria-label')")
    page.run("document.querySelector('#timeline [aria-label=\"Previous step\"]').click()")
    assert page.run("document.querySelector('#timeline svg').getAttribute('aria-label')") != before


def test_memory_shows_every_phase_and_device(page: Page) -> None:
    assert count(page, "#memory .cell") == 8 * 4
    assert count(page, "#memory .full") > 0  # the device that fills up
    click(page, "left after offloading", "#memory")
    click(page, "the latest step", "#memory")
    assert count(page, "#memory .cell") == 8 * 4
    assert count(page, "#memory canvas") == 1
    heading = "document.querySelector('#memory h3').textContent"
    page.run("document.querySelector('#memory .cell').dispatchEvent(new MouseEvent('click'))")
    assert page.run(heading) == "actor_infer/generate, left after offloading"


def test_a_metric_is_found_by_another_programs_name_and_drawn(page: Page) -> None:
    find = (
        "const box = document.querySelector('#metrics input'); box.value = {!r}; box.dispatchEvent(new Event('input'))"
    )
    page.run("{" + find.format("critic/entropy mean") + "}")
    assert page.run("document.querySelector('#metrics .metric code').textContent") == "actor/entropy"
    assert count(page, "#metrics canvas") == 0
    page.run("document.querySelector('#metrics .metric').click()")
    assert count(page, "#metrics canvas") == 1
    page.run("document.querySelector('#metrics .metric').click()")
    assert count(page, "#metrics canvas") == 0
    page.run("{" + find.format("") + "}")


def test_smoothing_and_logarithmic_scales_redraw(page: Page) -> None:
    click(page, "strong", "#curves")
    assert count(page, "#curves canvas") == NUM_CURVES
    click(page, "log", "#curves")
    assert page.run("[...charts].filter((chart) => chart.scales.y.distr === 3).length") == 1
    click(page, "none", "#curves")
    assert count(page, "#curves canvas") == NUM_CURVES


def test_zooming_one_chart_zooms_all_and_back(page: Page) -> None:
    ranges = "JSON.stringify([...new Set([...charts].map((chart) => chart.scales.x.min + ' ' + chart.scales.x.max))])"
    page.run("[...charts][3].setScale('x', {min: 10, max: 20})")
    assert page.run(f"Promise.resolve().then(() => {ranges})") == '["10 20"]'
    click(page, "all", "#curves")
    assert "10 20" not in page.run(f"Promise.resolve().then(() => {ranges})")


def test_arrow_keys_move_the_cursor(page: Page) -> None:
    page.run("""{
        const plot = document.querySelector('#curves .plot');
        plot.focus();
        plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}));
    }""")
    assert page.run("document.querySelector('#curves .where').textContent") == "step 59"


def test_samples_are_coloured_and_filtered(page: Page) -> None:
    assert count(page, "#samples .sample") == 24
    coloured = (
        "[...document.querySelectorAll('#samples .response .token')].filter((t) => t.style.backgroundColor).length"
    )
    by_logprob = page.run(coloured)
    click(page, "advantage", "#samples")
    assert 0 < page.run(coloured) != by_logprob > 0
    prompt = page.run("document.querySelector('#samples .prompt .text').textContent")
    page.run(f"{{ const box = document.querySelector('#samples input'); box.value = {prompt!r}; "
             "box.dispatchEvent(new Event('input')) }")  # fmt: skip
    assert count(page, "#samples .sample") == 4


def test_nothing_but_the_file_is_asked_for(page: Page) -> None:
    assert [url.partition(":")[0] for url in page.requests] == ["file"]


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_is_not_blank(report: Path, dark: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    with opened(report, height=1200, dark=dark) as page:
        picture = image.open(io.BytesIO(page.picture())).convert("RGB")
    assert picture.size == (1440, 1200)
    assert len(picture.getcolors(maxcolors=2**20)) > 200
    brightness = sum(picture.convert("L").getdata()) / (1440 * 1200)
    assert (brightness < 80) is dark


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    """A response, a prompt, a metric, a message and a setting that try to run or to hide."""
    evil = (
        '</script><script>document.body.dataset.errors="ran"</script><img src=x onerror="alert(1)">\u202e\u0000\x1b[31m'
    )
    run = make_run(tmp_path / "<script>alert(1)<!--", num_steps=3, num_devices=2)
    alerts = [{"rule": evil, "severity": 2, "message": evil}]
    write_ledger(run, [line(1, {evil: 1.0, "critic/score/mean": 0.5, "__proto__": 2.0}, alerts=alerts, run_id=evil)])
    (run / "resolved.yaml").write_text('model: {path: "</pre><script>alert(1)</script>"}\n')
    (run / "samples" / "step_000003.jsonl").write_text(_group_with(evil))
    assert main(["report", str(run)]) == 0
    with opened(run / "report.html") as page:
        assert page.run("document.body.dataset.errors") is None
        assert page.run("document.body.dataset.ready") == "true"
        assert page.run("document.querySelectorAll('img, main script, #identity script').length") == 0
        shown = page.run("document.querySelector('#samples .prompt .text').textContent")
        assert shown.startswith("</script><script>")
        assert shown.endswith("⟨202e⟩␀␛[31m")
        assert page.run("document.title").startswith("<script>alert(1)<!--")
        assert page.run("document.querySelector('h1').textContent") == "<script>alert(1)<!--"
        assert "</pre><script>" in page.run("document.querySelector('#config pre').textContent")
        assert "__proto__" in page.run("document.querySelector('#metrics').textContent")


def _group_with(text: str) -> str:
    sample = {"token_ids": [5, 6], "loss_mask": [0, 1], "rollout_logprobs": [0.0, -0.5], "reward": None, "finish": text}
    prompt = {"id": "p", "text": text, "token_ids": encode("1"), "answer": text}
    return json.dumps({"step": 1, "group": 0, "prompt": prompt, "samples": [sample]}) + "\n"


def test_a_run_with_nothing_but_a_ledger_says_what_is_missing(tmp_path: Path) -> None:
    write_ledger(tmp_path / "bare", [line(step, {"critic/score/mean": 0.1 * step}) for step in range(3)])
    assert main(["report", str(tmp_path / "bare")]) == 0
    with opened(tmp_path / "bare" / "report.html") as page:
        assert page.run("document.body.dataset.errors") is None
        told = page.run("[...document.querySelectorAll('.missing')].map((p) => p.textContent).join('\\n')")
        for name in (
            "timing_s/step_wall",
            "timeline.jsonl",
            "metrics.memory",
            "samples/",
            "resolved.yaml",
            "devices.json",
        ):
            assert name in told


@pytest.mark.slow
def test_the_report_of_a_real_run_compared_with_another(tmp_path: Path) -> None:
    """`megarl train` writes a report at its end; the command line draws two runs into one."""
    outcome = train(QUICKSTART, tmp_path, *SHORT)
    assert outcome.code == 0, outcome.stderr
    assert (outcome.directory / "report.html").is_file()
    assert f"Report: {outcome.directory / 'report.html'}" in outcome.stdout
    other = make_run(tmp_path / "other", num_steps=5, num_devices=2)
    page_file = tmp_path / "compared.html"
    assert main(["report", str(outcome.directory), "--compare", str(other), "--out", str(page_file)]) == 0
    with opened(page_file) as page:
        assert page.run("document.body.dataset.ready") == "true"
        assert page.run("document.body.dataset.errors") is None
        assert count(page, "#curves canvas") >= 10
        assert "Settings that differ" in page.run("document.querySelector('#comparison').textContent")
        assert "training score · other" in page.run("document.querySelector('#curves').textContent")

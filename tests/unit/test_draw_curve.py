"""The picture of a run shows the numbers of its ledger."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_curve", ROOT / "tools" / "draw_curve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def supervised(step: int) -> dict[str, float]:
    return {"actor/sft_loss": 1.0, "timing_s/step_wall": 0.2, "time/actor_train/train_step/execute": 0.2, "step": step}


def learned(score: float) -> dict[str, float]:
    return {
        "critic/score/mean": score,
        "timing_s/step_wall": 2.0,
        "time/actor_infer/generate/execute": 0.5,
        "time/actor_infer/generate/offload": 0.1,
        "time/actor_infer/generate/total": 0.6,
        "time/actor_train/train_step/execute": 1.0,
        "time/actor_train/train_step/onload": 0.2,
        "time/data/read/execute": 0.001,
    }


def typical_run() -> list[dict[str, Any]]:
    """An evaluation, 20 supervised steps, 4 steps of learning with an evaluation after the second and the last."""
    accuracy = "eval/held_out/score/mean@1"
    metrics = [{accuracy: 0.0}, *(supervised(step) for step in range(1, 21)), *(learned(0.2 * i) for i in range(1, 5))]
    metrics[20][accuracy] = 0.25
    metrics[22][accuracy] = 0.5
    metrics[24][accuracy] = 1.0
    return [{"step": step, "time": 0.0, "metrics": values} for step, values in enumerate(metrics)]


def write_run(directory: Path, records: list[dict[str, Any]], tail: str = "") -> Path:
    directory.mkdir()
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text + tail, encoding="utf-8")
    return directory


def drawn(run: Path) -> ElementTree.Element:
    picture = run / "curve.svg"
    assert tool.main([str(run), str(picture)]) == 0
    return ElementTree.parse(picture).getroot()


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def test_every_evaluation_is_a_dot_at_its_height(tmp_path: Path) -> None:
    svg = drawn(write_run(tmp_path / "run", typical_run()))
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in svg.iter(f"{SVG}circle")]
    assert [x for x, _ in dots] == sorted({x for x, _ in dots})
    heights = [y for _, y in dots]
    assert len(heights) == 4
    # 0, 0.25, 0.5 and 1 on one scale; coordinates are rounded to a tenth of a pixel
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert heights[0] - heights[3] == pytest.approx(4 * (heights[0] - heights[1]), abs=0.4)
    assert "held_out 100.0 %" in texts(svg)
    assert any("25.0 % before, 100.0 % after" in text for text in texts(svg))


def test_the_warmup_is_shaded_and_ends_where_learning_begins(tmp_path: Path) -> None:
    svg = drawn(write_run(tmp_path / "run", typical_run()))
    shades = [element for element in svg.iter(f"{SVG}rect") if element.get("class") == "warmup"]
    assert len(shades) == 2
    edge = float(shades[0].get("x", "")) + float(shades[0].get("width", ""))
    dots = [float(dot.get("cx", "")) for dot in svg.iter(f"{SVG}circle")]
    assert dots[1] == pytest.approx(edge, abs=0.1)  # the evaluation after step 20
    # 20 of 24 steps are warm-up, but it may not take more than its share of the width
    assert (edge - tool.LEFT) / (tool.RIGHT - tool.LEFT) == pytest.approx(tool.WARMUP_SHARE, abs=0.001)
    assert any("drawn narrower" in text for text in texts(svg))


def test_time_is_stacked_by_phase_with_moving_apart_and_small_phases_together(tmp_path: Path) -> None:
    steps = tool.read_steps(write_run(tmp_path / "run", typical_run()) / "metrics.jsonl")
    layers = {layer.name: sum(layer.seconds) for layer in tool.time_layers(steps)}
    assert list(layers) == ["train_step", "generate", "moving memory", "everything else"]
    assert layers["train_step"] == pytest.approx(20 * 0.2 + 4 * 1.0)
    assert layers["generate"] == pytest.approx(4 * 0.5)
    assert layers["moving memory"] == pytest.approx(4 * (0.1 + 0.2))
    assert layers["everything else"] == pytest.approx(4 * 0.001)


def test_layers_lie_on_each_other_and_end_at_the_floor(tmp_path: Path) -> None:
    svg = drawn(write_run(tmp_path / "run", typical_run()))
    polygons = [element for element in svg.iter(f"{SVG}polygon") if element.get("class") == "phase"]
    outlines = [[tuple(map(float, p.split(","))) for p in polygon.get("points", "").split()] for polygon in polygons]
    half = len(outlines[0]) // 2
    assert {y for _, y in outlines[0][half:]} == {float(tool.BOTTOM[1])}
    for below, above in itertools.pairwise(outlines):
        assert below[:half] == list(reversed(above[half:]))


def test_phases_of_one_name_keep_their_models(tmp_path: Path) -> None:
    records = typical_run()
    for record in records[21:]:
        record["metrics"]["time/critic/train_step/execute"] = 0.7
    steps = tool.read_steps(write_run(tmp_path / "run", records) / "metrics.jsonl")
    names = [layer.name for layer in tool.time_layers(steps)]
    assert "actor_train/train_step" in names
    assert "critic/train_step" in names
    assert "generate" in names


@pytest.mark.parametrize(
    "metrics",
    [
        [supervised(1), supervised(2)],  # nothing but supervised learning: no warm-up
        [learned(0.1), learned(0.2)],  # neither warm-up nor evaluation
        [learned(0.3)],
        [{"eval/a/score/mean@4": -0.5}, {"eval/b/score/mean@1": 3.0}],  # scores beyond 0 and 1, no times
        [{}],
    ],
    ids=["sft", "no-warmup", "one-step", "any-score", "empty"],
)
def test_runs_of_every_kind_can_be_drawn(metrics: list[dict[str, float]], tmp_path: Path) -> None:
    records = [{"step": i, "time": 0.0, "metrics": values} for i, values in enumerate(metrics, start=1)]
    svg = drawn(write_run(tmp_path / "run", records))
    assert not [element for element in svg.iter() if element.get("class") == "warmup"]
    for element in svg.iter():
        for value in element.attrib.values():
            assert "nan" not in value
            assert "inf" not in value


def test_scores_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    records = typical_run()
    records[23]["metrics"]["critic/score/mean"] = "NaN"
    svg = drawn(write_run(tmp_path / "run", records))
    assert all("nan" not in (line.get("points") or "") for line in svg.iter(f"{SVG}polyline"))


def test_an_unfinished_line_is_ignored_and_names_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a&b<c", typical_run(), tail='{"step": 25, "ti')
    assert tool.read_steps(run / "metrics.jsonl")[-1].number == 24
    assert "a&b<c" in texts(drawn(run))


def test_the_picture_stands_alone(tmp_path: Path) -> None:
    for svg in (drawn(write_run(tmp_path / "run", typical_run())), shipped()):
        assert {element.tag.removeprefix(SVG) for element in svg.iter()} <= {
            "svg", "rect", "text", "line", "polyline", "polygon", "circle",
        }  # fmt: skip
        assert not any("href" in name or "url(" in value for e in svg.iter() for name, value in e.attrib.items())


def shipped() -> ElementTree.Element:
    return ElementTree.parse(ROOT / "docs" / "images" / "quickstart.svg").getroot()


def test_the_shipped_picture_is_of_the_quickstart() -> None:
    assert "quickstart" in texts(shipped())


def test_side_labels_never_touch() -> None:
    labels = [(100.0 + i, f"label {i}", "#000000") for i in range(8)]
    heights = [float(ElementTree.fromstring(text).get("y", "")) for text in tool._side_labels(labels)]
    assert all(later - earlier >= 15.9 for earlier, later in itertools.pairwise(heights))


@pytest.mark.parametrize(("least", "unit"), [(0.3, 1), (1, 1), (1.5, 2), (3, 5), (6, 10), (33, 50), (100, 100)])
def test_ticks_are_round(least: float, unit: int) -> None:
    assert tool.nice_unit(least) == unit


def test_ticks_do_not_touch_and_include_both_ends() -> None:
    for warmup_end, last in [(0, 30), (200, 230), (5, 10000), (0, 1)]:
        axis = tool.StepAxis(0, warmup_end, last)
        ticks = axis.ticks()
        assert ticks[0] == 0
        assert ticks[-1] == last
        places = [axis.x(tick) for tick in ticks]
        assert all(later - earlier > 26 for earlier, later in itertools.pairwise(places))
        assert math.isclose(places[-1], tool.RIGHT)


def test_mistakes_end_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 64
    assert "usage" in capsys.readouterr().err
    assert tool.main([str(tmp_path), "x.svg"]) == 66
    assert "does not exist" in capsys.readouterr().err
    empty = write_run(tmp_path / "run", [])
    assert tool.main([str(empty), "x.svg"]) == 65
    assert "no finished step" in capsys.readouterr().err

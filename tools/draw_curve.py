"""Draw a run as one SVG: what it learned, and where the time of its steps went.

    python tools/draw_curve.py runs/quickstart docs/images/quickstart.svg

Reads ``metrics.jsonl`` of the run directory. Above: the accuracy on every evaluation set and the score of the training
samples. Below: seconds per step, stacked by phase. The warm-up is shaded, and when it has many steps they are drawn
narrower: the eye should rest on what comes after it. Needs nothing but Python.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 940, 560
LEFT, RIGHT = 66, 690  # the plots; labels stand to the right of them
TOP = (112, 302)  # upper plot, from top to bottom
BOTTOM = (362, 500)  # lower plot
LABEL_HEIGHT = 16
WARMUP_SHARE = 0.3  # of the width, at most
MIN_SHARE_OF_TIME = 0.02  # phases below it are drawn together as "everything else"

INK, SOFT, GRID, SHADE = "#1f2933", "#66727f", "#e4e8ec", "#f3f5f7"
TRAINING = "#e08a3c"
EVALUATION = ("#1668a8", "#2a8c5a", "#8a4fa3")
PHASES = ("#3a78b5", "#f0a848", "#62b5a5", "#a97bb5", "#d98880", "#7f8c9a", "#b8a35e", "#5d6d9a")
MOVING, REST = "#c3cbd3", "#e0dcd3"


@dataclass(frozen=True)
class Step:
    """One line of the ledger."""

    number: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Layer:
    """One colour of the stack: seconds in every step."""

    name: str
    colour: str
    seconds: list[float]


class StepAxis:
    """Where steps are on the paper. Step ``n`` fills the slot from ``x(n - 1)`` to ``x(n)``."""

    def __init__(self, first: int, warmup_end: int, last: int) -> None:
        self.first, self.warmup_end, self.last = first, warmup_end, max(last, first + 1)
        fair_share = (warmup_end - first) / (self.last - first)
        self.boundary = LEFT + (RIGHT - LEFT) * min(fair_share, WARMUP_SHARE)

    @property
    def is_uneven(self) -> bool:
        """Whether the two stages have different scales."""
        return (self.warmup_end - self.first) / (self.last - self.first) > WARMUP_SHARE

    def x(self, step: float) -> float:
        """The place of the end of ``step``."""
        if step <= self.warmup_end and self.warmup_end > self.first:
            return LEFT + (self.boundary - LEFT) * (step - self.first) / (self.warmup_end - self.first)
        return self.boundary + (RIGHT - self.boundary) * (step - self.warmup_end) / max(1, self.last - self.warmup_end)

    def ticks(self) -> list[int]:
        """Round numbers in each stage, and both ends."""
        spans = [(self.first, self.warmup_end, 2), (self.warmup_end, self.last, 6)]
        found = {self.first, self.last}
        for start, end, count in spans:
            unit = nice_unit((end - start) / count)
            multiples = range(math.ceil(start / unit) * unit, end + 1, unit)
            found |= {tick for tick in multiples if self._has_room(tick, found)}
        return sorted(found)

    def _has_room(self, tick: int, taken: set[int]) -> bool:
        return all(abs(self.x(tick) - self.x(other)) > 26 for other in taken)


def read_steps(path: Path) -> list[Step]:
    """The ledger's lines; one that is not finished yet is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    records = (json.loads(line) for line in lines)
    return [
        Step(record["step"], {name: float(value) for name, value in record["metrics"].items()}) for record in records
    ]


def end_of_warmup(steps: list[Step]) -> int:
    """The last step before samples were scored for the first time; the first step if there is no such stage."""
    scored = [step.number for step in steps if "critic/score/mean" in step.metrics]
    supervised = [step.number for step in steps if "actor/sft_loss" in step.metrics]
    has_warmup = scored and supervised and supervised[0] < scored[0]
    return scored[0] - 1 if has_warmup else steps[0].number


def evaluations(steps: list[Step]) -> dict[str, list[tuple[int, float]]]:
    """For every evaluation set, (step, accuracy after it)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for name, value in step.metrics.items():
            if name.startswith("eval/") and "/score/mean@" in name and math.isfinite(value):
                found.setdefault(name.removeprefix("eval/").partition("/score/")[0], []).append((step.number, value))
    return found


def time_layers(steps: list[Step]) -> list[Layer]:
    """The work of every phase, then the moving of memory between phases, then what is too small to see."""
    phases: dict[str, list[float]] = {}
    moving = [0.0] * len(steps)
    for i, step in enumerate(steps):
        for name, seconds in step.metrics.items():
            if not name.startswith("time/"):
                continue
            phase, _, part = name.removeprefix("time/").rpartition("/")
            if part == "execute":
                phases.setdefault(phase, [0.0] * len(steps))[i] += seconds
            elif part in ("onload", "offload"):
                moving[i] += seconds
    total = sum(map(sum, phases.values())) + sum(moving)
    large = {name: seconds for name, seconds in phases.items() if sum(seconds) >= MIN_SHARE_OF_TIME * total}
    small = [seconds for name, seconds in phases.items() if name not in large]
    ranked = sorted(large.items(), key=lambda item: -sum(item[1]))
    verbs = [name.rpartition("/")[2] for name in large]
    layers = []
    for i, (name, per_step) in enumerate(ranked):
        verb = name.rpartition("/")[2]
        layers.append(Layer(verb if verbs.count(verb) == 1 else name, PHASES[i % len(PHASES)], per_step))
    layers.append(Layer("moving memory", MOVING, moving))
    layers.append(Layer("everything else", REST, [sum(column) for column in zip(*small, strict=True)]))
    return [layer for layer in layers if sum(layer.seconds) > 0]


def nice_unit(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 … that is not below ``least``."""
    power: int = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    return next(unit * power for unit in (1, 2, 5, 10) if unit * power >= least)


def draw(name: str, steps: list[Step]) -> str:
    """The whole picture."""
    axis = StepAxis(steps[0].number, end_of_warmup(steps), steps[-1].number)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(name, {chr(34): "&quot;"})}: scores and time per step" '
        'font-family="Inter, Helvetica Neue, Helvetica, Arial, sans-serif" font-size="12.5">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
        *_heading(name, steps, axis),
        *_stages(axis),
        *_learning(steps, axis),
        *_time(steps, axis),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _heading(name: str, steps: list[Step], axis: StepAxis) -> list[str]:
    gains = []
    for eval_set, points in evaluations(steps).items():
        before = next((value for step, value in points if step >= axis.warmup_end), points[0][1])
        gains.append(f"{eval_set} accuracy {_percent(before)} before, {_percent(points[-1][1])} after")
    wall = sum(step.metrics.get("timing_s/step_wall", 0.0) for step in steps)
    facts = [*gains, f"{axis.last - axis.first:,} steps in {wall:,.1f} s"]
    return [
        _text(LEFT, 36, name, size=19, weight=600),
        _text(LEFT, 59, "  ·  ".join(facts), colour=SOFT, size=13.5),
    ]


def _stages(axis: StepAxis) -> list[str]:
    parts = []
    after = (axis.boundary + RIGHT) / 2
    if axis.warmup_end > axis.first:
        for top, bottom in (TOP, BOTTOM):
            parts.append(
                f'<rect class="warmup" x="{LEFT}" y="{top}" width="{axis.boundary - LEFT:.1f}" '
                f'height="{bottom - top}" fill="{SHADE}"/>'
            )
        middle = (LEFT + axis.boundary) / 2
        parts.append(_text(middle, TOP[0] - 12, "warm-up on demonstrations", colour=SOFT, anchor="middle"))
        parts.append(_text(after, TOP[0] - 12, "reinforcement learning", colour=SOFT, anchor="middle"))
    for tick in axis.ticks():
        x = axis.x(tick)
        parts.append(_line(x, BOTTOM[1], x, BOTTOM[1] + 5, SOFT))
        parts.append(_text(x, BOTTOM[1] + 19, str(tick), colour=SOFT, anchor="middle"))
    note = "step (warm-up steps are drawn narrower)" if axis.is_uneven else "step"
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM[1] + 41, note, colour=SOFT, anchor="middle"))
    return parts


def _learning(steps: list[Step], axis: StepAxis) -> list[str]:
    curves = evaluations(steps)
    scores = [(s.number, s.metrics["critic/score/mean"]) for s in steps if "critic/score/mean" in s.metrics]
    scores = [(number, value) for number, value in scores if math.isfinite(value)]
    values = [value for points in [*curves.values(), scores] for _, value in points]
    low, high = min([0.0, *values]), max([1.0, *values])

    def y(value: float) -> float:
        return TOP[1] - (TOP[1] - TOP[0] - 14) * (value - low) / (high - low)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + share * (high - low)
        parts.append(_line(LEFT, y(value), RIGHT, y(value), GRID))
        parts.append(_text(LEFT - 9, y(value) + 4, _percent(value, digits=0), colour=SOFT, anchor="end"))
    parts.append(_sideways(TOP, "mean score"))
    labels = []
    if scores:
        # The samples of a step come from the weights before it: they belong to the middle of its slot.
        points = [(axis.x(number - 0.5), y(value)) for number, value in scores]
        parts.append(_polyline(points, TRAINING, 1.6))
        labels.append((points[-1][1], f"training samples {_percent(scores[-1][1])}", _darker(TRAINING)))
    for i, (eval_set, measured) in enumerate(curves.items()):
        colour = EVALUATION[i % len(EVALUATION)]
        points = [(axis.x(number), y(value)) for number, value in measured]
        parts.append(_polyline(points, colour, 2.4))
        for x, height in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{height:.1f}" r="4" fill="{colour}" stroke="#ffffff"/>')
        for (x, height), (_, above), (_, value) in zip(points, points[1:], measured, strict=False):
            # Under a curve that rises from here, else over it: the number must not stand on the line.
            dy = 17 if height - above > 15 else -9
            parts.append(_text(x + 5, height + dy, _percent(value), colour=colour, size=11.5))
        labels.append((points[-1][1], f"{eval_set} {_percent(measured[-1][1])}", colour))
    return parts + _side_labels(labels)


def _time(steps: list[Step], axis: StepAxis) -> list[str]:
    timed = [step for step in steps if "timing_s/step_wall" in step.metrics]
    layers = time_layers(timed)
    if not layers:
        return []
    walls = [step.metrics["timing_s/step_wall"] for step in timed]
    stacks = [sum(layer.seconds[i] for layer in layers) for i in range(len(timed))]
    unit = _seconds_unit(max([*stacks, *walls]))
    high = max([*stacks, *walls]) * 1.04

    def y(seconds: float) -> float:
        return BOTTOM[1] - (BOTTOM[1] - BOTTOM[0]) * seconds / high

    parts = []
    for count in range(int(high / unit) + 1):
        parts.append(_line(LEFT, y(count * unit), RIGHT, y(count * unit), GRID))
        parts.append(_text(LEFT - 9, y(count * unit) + 4, f"{count * unit:g}", colour=SOFT, anchor="end"))
    edges = [(axis.x(step.number - 1), axis.x(step.number)) for step in timed]
    floor = [0.0] * len(timed)
    labels = []
    for layer in layers:
        ceiling = [below + seconds for below, seconds in zip(floor, layer.seconds, strict=True)]
        upper = _staircase(edges, [y(value) for value in ceiling])
        lower = _staircase(edges, [y(value) for value in floor])
        outline = " ".join(f"{x:.1f},{height:.1f}" for x, height in [*upper, *reversed(lower)])
        parts.append(f'<polygon class="phase" points="{outline}" fill="{layer.colour}"/>')
        recent = range(max(0, len(timed) - 5), len(timed))
        middle = sum((floor[i] + ceiling[i]) / 2 for i in recent) / len(recent)
        ink = SOFT if layer.colour in (MOVING, REST) else _darker(layer.colour)
        labels.append((y(middle), f"{layer.name} {sum(layer.seconds):,.1f} s", ink))
        floor = ceiling
    parts.append(_polyline(_staircase(edges, [y(wall) for wall in walls]), INK, 0.9))
    above = min(height for height, _, _ in labels) - LABEL_HEIGHT
    labels.append((above, f"wall clock {sum(walls):,.1f} s", INK))
    parts.append(_sideways(BOTTOM, "seconds per step"))
    caption = "Colours: each phase on its slowest rank, so a stack may pass the wall clock of its step (black line)."
    parts.append(_text(LEFT, BOTTOM[0] - 14, caption, colour=SOFT, size=11.5))
    return parts + _side_labels(labels)


def _staircase(edges: list[tuple[float, float]], heights: list[float]) -> list[tuple[float, float]]:
    return [(x, height) for (left, right), height in zip(edges, heights, strict=True) for x in (left, right)]


def _side_labels(labels: list[tuple[float, str, str]]) -> list[str]:
    """Labels to the right of the plot, never on each other and as near to their curves as that allows."""
    ranked = sorted(labels)
    # Labels that would touch form a block of neighbours, which stands where its members want to be on average.
    blocks: list[list[float]] = []
    for i, (wanted, _, _) in enumerate(ranked):
        blocks.append([wanted - i * LABEL_HEIGHT])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = [_mean(block) for block in blocks for _ in block]
    return [
        _text(RIGHT + 12, place + i * LABEL_HEIGHT + 4, text, colour=colour, size=11.5)
        for i, (place, (_, text, colour)) in enumerate(zip(places, ranked, strict=True))
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _darker(colour: str) -> str:
    """A colour for text: what is bright enough for an area is too bright for letters."""
    return "#" + "".join(f"{int(0.75 * int(colour[i : i + 2], 16)):02x}" for i in (1, 3, 5))


def _seconds_unit(highest: float) -> float:
    """A distance of grid lines that gives two to five of them."""
    power: float = 10.0 ** math.floor(math.log10(max(highest, 1e-6)))
    return next(unit * power for unit in (0.2, 0.5, 1, 2, 5) if highest / (unit * power) <= 5)


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def _sideways(plot: tuple[int, int], text: str) -> str:
    middle = (plot[0] + plot[1]) / 2
    turn = f"translate(16 {middle:.1f}) rotate(-90)"
    return f'<text transform="{turn}" text-anchor="middle" fill="{SOFT}">{escape(text)}</text>'


def _text(
    x: float, y: float, text: str, *, colour: str = INK, size: float = 12.5, weight: int = 400, anchor: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _polyline(points: list[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'


def main(arguments: list[str]) -> int:
    """``draw_curve.py RUN_DIRECTORY PICTURE.svg``."""
    if len(arguments) != 2:
        print("usage: python tools/draw_curve.py RUN_DIRECTORY PICTURE.svg", file=sys.stderr)
        return 64
    run, picture = Path(arguments[0]), Path(arguments[1])
    ledger = run / "metrics.jsonl"
    if not ledger.is_file():
        print(f"{ledger} does not exist. Name the directory of a run.", file=sys.stderr)
        return 66
    steps = read_steps(ledger)
    if not steps:
        print(f"{ledger} has no finished step yet.", file=sys.stderr)
        return 65
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(draw(run.resolve().name, steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

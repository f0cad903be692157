"use strict";
// One step: what every rank did when. Moving states in and out is hatched.

const ROW = { gap: 4, top: 8, axis: 34, left: 170, right: 90 };
const KIND_NAMES = ["onload", "execute", "offload"];
let shownStep = 0;

function drawTimeline() {
  const steps = run.timeline;
  if (!steps.length)
    return missing(
      "timeline",
      "No step was recorded: there is no ",
      make("code", { text: "timeline.jsonl" }),
      " in the run directory.",
    );
  const place = section("timeline");
  const chart = make("div", { class: "plot timeline" });
  const go = (index) => {
    shownStep = Math.min(Math.max(index, 0), steps.length - 1);
    picker.querySelector("select").value = String(shownStep);
    chart.replaceChildren(timelineOf(steps[shownStep], chart.clientWidth || 1000));
  };
  const picker = select(
    "Step",
    steps.map((one, i) => [String(i), String(one.step)]),
    "0",
    (value) => go(Number(value)),
  );
  const buttons = [
    ["‹", "Previous step", -1],
    ["›", "Next step", 1],
  ].map(([text, label, change]) =>
    make("button", { type: "button", text, "aria-label": label, onclick: () => go(shownStep + change) }),
  );
  place.append(make("div", { class: "controls" }, picker, ...buttons, timelineKeys(steps)), chart);
  chart.redraw = () => go(shownStep);
  go(steps.length - 1); // the latest: the first ones are of a warm-up, or of a cold machine
}

function timelineKeys(steps) {
  const phases = [
    ...new Set(steps.flatMap((step) => step.rows.flatMap((row) => row.segments.map((segment) => segment[0])))),
  ];
  const keys = phases.map((phase) =>
    make("span", { class: "key" }, swatch({ colour: phaseVariable(phase) }), make("code", { text: phase })),
  );
  return make(
    "div",
    { class: "keys" },
    ...keys,
    make("span", { class: "key" }, make("i", { class: "swatch hatched" }), "onload, offload"),
  );
}

function timelineOf(step, width) {
  const height = step.rows.length > 24 ? 10 : step.rows.length > 8 ? 16 : 24;
  const gap = step.rows.length > 24 ? 2 : ROW.gap;
  const inner = width - ROW.left - ROW.right;
  const end = Math.max(1e-9, ...step.rows.flatMap((row) => row.segments.map((segment) => segment[2] + segment[3])));
  const total = ROW.top + step.rows.length * (height + gap);
  const x = (time) => ROW.left + (inner * time) / end;
  const root = svg("svg", {
    width,
    height: total + ROW.axis,
    role: "img",
    "aria-label": "Timeline of step " + step.step + ", " + step.rows.length + " rows, " + seconds(end),
  });
  root.append(svg("defs", {}, hatch()));
  for (const time of niceTicks(end, 8)) {
    root.append(
      svg("line", { x1: x(time), x2: x(time), y1: ROW.top, y2: total, class: "gridline" }),
      svg("text", {
        x: x(time),
        y: total + 20,
        class: "tick middle",
        text: end < 1 ? tick(1000 * time) + " ms" : tick(time) + " s",
      }),
    );
  }
  step.rows.forEach((row, index) => {
    const y = ROW.top + index * (height + gap);
    const busy = row.segments.reduce((sum, segment) => sum + (segment[1] === 1 ? segment[3] : 0), 0);
    const labelled = height >= 16 || index % 4 === 0;
    if (labelled)
      root.append(svg("text", { x: ROW.left - 10, y: y + height / 2 + 4, class: "tick end", text: row.label }));
    if (labelled)
      root.append(
        svg("text", { x: ROW.left + inner + 10, y: y + height / 2 + 4, class: "tick", text: percent(busy / end) }),
      );
    root.append(svg("rect", { x: ROW.left, y, width: inner, height, class: "idle" }));
    for (const segment of row.segments) root.append(segmentBox(row, segment, x, y, height));
  });
  root.append(svg("text", { x: ROW.left + inner + 10, y: total + 20, class: "tick", text: "at work" }));
  return root;
}

function segmentBox(row, [phase, kind, start, length], x, y, height) {
  const box = svg(
    "g",
    {},
    svg("title", {
      text: row.label + "\n" + phase + ", " + KIND_NAMES[kind] + "\n" + seconds(length) + ", from " + seconds(start),
    }),
  );
  const size = { x: x(start), y, width: Math.max(0.75, x(start + length) - x(start)), height };
  box.append(svg("rect", { ...size, fill: phaseVariable(phase), class: kind === 1 ? "segment" : "segment moving" }));
  if (kind !== 1) box.append(svg("rect", { ...size, fill: "url(#hatch)" }));
  return box;
}

function hatch() {
  const pattern = svg("pattern", {
    id: "hatch",
    width: 6,
    height: 6,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  });
  pattern.append(svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatching" }));
  return pattern;
}

function niceTicks(end, count) {
  const rough = end / count;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => one >= rough);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}

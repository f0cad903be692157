"use strict";
// The learning curves, with smoothing, and both runs where there are two.

// Thousands of steps are a band, not a line: their trend is shown in front of it.
let smoothing = Object.values(run.series).some((series) => series.n) ? 0.6 : 0;

function drawCurves() {
  const place = section("curves");
  for (const chart of [...charts]) if (place.contains(chart.root)) forget(chart);
  place.replaceChildren();
  const smoothChoice = choice(
    "Smoothing",
    [
      [0, "none"],
      [0.6, "some"],
      [0.9, "strong"],
    ],
    smoothing,
    (weight) => {
      smoothing = weight;
      drawCurves();
    },
  );
  const hint = make("span", {
    class: "hint",
    text: "Drag to zoom, double-click to see everything. Arrow keys move the cursor of a focused chart.",
  });
  const cards = report.charts
    .map((chart) => curveCard(chart.title, chart.names, { wide: chart.wide, height: chart.wide ? 300 : 190 }))
    .filter(Boolean);
  place.append(
    make("div", { class: "controls" }, smoothChoice, stepChoice(), hint),
    make("div", { class: "charts" }, ...cards),
    legendOfMarks(),
  );
  for (const card of cards) card.draw();
}

// All steps, or only those after the warm-up; neither while the reader has chosen others by dragging.
function stepChoice() {
  const last = lastStep();
  const ranges = { all: [null, null], main: [run.warmup_steps, last] };
  const options = [["all", "all"]].concat(
    run.warmup_steps && run.warmup_steps < last ? [["main", "after the warm-up"]] : [],
  );
  const control = choice("Steps", options, "", (key) => setZoom(...ranges[key]));
  zoomListeners.length = 0;
  zoomListeners.push(() =>
    [...control.querySelectorAll("button")].forEach((button, i) =>
      button.setAttribute(
        "aria-pressed",
        String(ranges[options[i][0]][0] === zoom.min && ranges[options[i][0]][1] === zoom.max),
      ),
    ),
  );
  zoomListeners[0]();
  return control;
}

function legendOfMarks() {
  const parts = [];
  if (run.warmup_steps) parts.push("The shaded steps are the warm-up.");
  if (run.alerts.length) parts.push("Flags at the upper edge: a health rule spoke.");
  if (Object.values(run.series).some((series) => series.y.some((value) => typeof value === "string")))
    parts.push("Red crosses: the value was not finite.");
  if (Object.values(run.series).some((series) => series.n))
    parts.push("Of long series the smallest and the largest value of every stretch are drawn.");
  return make("p", { class: "hint", text: parts.join(" ") });
}

// A chart of some metrics; null if no run has any of them.
function curveCard(title, names, options) {
  const lines = [];
  const chosen = otherRun && !options.wide ? names.slice(0, 1) : names;
  chosen.forEach((name, nameIndex) => {
    const about = report.about[name];
    const label = shortName(name, names);
    report.runs.forEach((from, runIndex) => {
      const series = readSeries(from, name);
      if (!series) return;
      lines.push(
        ...smoothed({
          ...series,
          label: otherRun ? label + " · " + from.name : label,
          title: name + (about ? "\n" + about.doc + " (" + about.unit + ")" : ""),
          // One metric: a colour for each run. Several: a colour for each metric; the dashes tell the runs apart.
          colour: seriesColour(chosen.length > 1 ? nameIndex : runIndex),
          dashed: runIndex > 0,
        }),
      );
    });
  });
  if (!lines.length) return null;
  const range = extent(lines.flatMap((line) => extent(line.values) || []));
  options.canBeLog = range && range[0] > 0 && range[1] / range[0] > 10;
  options.marks = true;
  if (options.wide && range && range[0] >= 0 && range[1] <= 1) {
    options.range = () => [0, 1.02];
    for (const line of lines) line.share = true;
  }
  const unit = report.about[names[0]] ? report.about[names[0]].unit : "";
  options.unit = unit === "1" || options.wide ? "" : unit;
  // What comes first is most important: it is painted last, over the others, and all raw values below all smoothed ones.
  options.topDown = true;
  return chartCard(
    title,
    lines
      .filter((line) => !line.faint)
      .concat(lines.filter((line) => line.faint))
      .reverse(),
    options,
  );
}

function smoothed(line) {
  if (!smoothing || line.values.length < 20) return [line];
  const source = line.means || line;
  return [
    { ...line, faint: true },
    { ...line, broken: [], steps: source.steps, values: smooth(source.values, smoothing) },
  ];
}

// What tells the names of one chart apart: "mean" of response_length/mean, the whole name if it stands alone.
function shortName(name, names) {
  const evaluation = name.match(/^eval\/(.+)\/score\/mean@(\d+)$/);
  if (evaluation) return "evaluation " + evaluation[1] + (evaluation[2] === "1" ? "" : ", mean of " + evaluation[2]);
  if (name === "critic/score/mean") return "training score";
  if (
    names.length > 1 &&
    names.every((one) => one.split("/").slice(0, -1).join("/") === name.split("/").slice(0, -1).join("/"))
  )
    return name.split("/").pop();
  return name;
}

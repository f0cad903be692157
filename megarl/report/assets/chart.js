"use strict";
// Lines over steps, on uPlot: values at the cursor in the heading, zoom shared by all charts, gaps and alerts marked.

const FONT = "13px system-ui, sans-serif";
const charts = new Set();
const zoom = { min: null, max: null };

// Steps and values of a series. Non-finite values are null and stand in `broken`.
function readSeries(from, name) {
  const series = from.series[name];
  if (!series) return null;
  const values = series.y.map((value) => (typeof value === "string" ? null : value));
  const steps = grid(from, series.x);
  const broken = steps.filter((_, i) => typeof series.y[i] === "string");
  const means = series.my ? { steps: grid(from, series.mx), values: series.my } : null;
  return { steps, values, broken, means, numPoints: series.n || steps.length };
}

const gridCache = new Map();
function grid(from, index) {
  const deltas = from.grids[index];
  if (!gridCache.has(deltas)) {
    let step = 0;
    gridCache.set(
      deltas,
      deltas.map((delta) => (step += delta)),
    );
  }
  return gridCache.get(deltas);
}

// Exponential moving average without the pull of its start.
function smooth(values, weight) {
  let sum = 0,
    norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function extent(values) {
  let low = Infinity,
    high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

// lines: [{label, colour, steps, values, broken, dashed, faint, width}], options: {height, log, range, marks, limit, onvalues}
// Values of the lines at the cursor, or the last ones, go to `onvalues`.
function drawLines(target, lines, options) {
  const data = uPlot.join(lines.map((line) => [line.steps, line.values]));
  const draw = () => {
    const chart = new uPlot(uplotOptions(target, lines, options), data, target);
    chart.megarl = { lines, options };
    charts.add(chart);
    if (zoom.min !== null) applyZoom(chart);
    target.redraw = () => {
      forget(chart);
      draw();
    };
    showValues(chart);
  };
  draw();
}

function forget(chart) {
  charts.delete(chart);
  chart.destroy();
}

function uplotOptions(target, lines, options) {
  const axis = {
    font: FONT,
    stroke: colour("soft"),
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
  };
  const series = lines.map((line) => ({
    label: line.label,
    stroke: line.faint ? line.colour + "55" : line.colour,
    width: line.faint ? 1 : line.width || (line.steps.length > 500 ? 1.25 : 2),
    dash: line.dashed ? [6, 4] : undefined,
    fill: line.fill,
    points: { show: !line.faint && !line.fill && line.steps.length <= 25, size: 6, fill: line.colour },
    spanGaps: false,
  }));
  return {
    width: target.clientWidth || 400,
    height: options.height || 190,
    legend: { show: false },
    padding: [10, 18, 0, 0],
    scales: {
      x: { time: false },
      y: { distr: options.log ? 3 : 1, range: options.log ? undefined : options.range || padded },
    },
    axes: [
      { ...axis, size: 30, values: (u, ticks) => ticks.map((value) => (Number.isInteger(value) ? tick(value) : "")) },
      { ...axis, size: 58, values: (u, ticks) => ticks.map((value) => (value === null ? "" : tick(value))) },
    ],
    series: [{}, ...series],
    bands: options.bands,
    cursor: {
      sync: { key: "steps", setSeries: false },
      drag: { x: true, y: false },
      points: { size: 7 },
      focus: { prox: -1 },
    },
    hooks: {
      drawClear: [shadeWarmup],
      draw: [
        (u) => {
          drawBroken(u, lines);
          if (options.marks) drawAlerts(u);
          if (options.limit) drawLimit(u, options.limit);
        },
      ],
      setCursor: [showValues],
      setScale: [(u, key) => key === "x" && shareZoom(u)],
    },
  };
}

function padded(u, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// The chart at hand hears of a cursor in any other one. The heading shows the latest value at or before it.
function showValues(u) {
  if (!u.megarl) return;
  const { lines, options } = u.megarl;
  const index = u.cursor.idx;
  const at = index === null || index === undefined ? u.data[0].length - 1 : index;
  if (options.onvalues)
    options.onvalues(
      lines.map((line, i) => lastValue(u.data[i + 1], at)),
      index === null || index === undefined ? null : u.data[0][at],
    );
}

function lastValue(values, at) {
  for (let i = at; i >= 0; i--) if (values[i] !== undefined) return values[i];
  return undefined;
}

// -- zoom, shared by all charts over steps

const zoomListeners = [];
let isSharing = false;
function shareZoom(u) {
  const { min, max } = u.scales.x;
  if (isSharing || min === null || !u.megarl) return;
  const steps = u.data[0];
  const isWhole = min <= steps[0] && max >= steps[steps.length - 1];
  if (isWhole && zoom.min === null) return;
  setZoom(isWhole ? null : min, isWhole ? null : max);
}

function setZoom(min, max) {
  Object.assign(zoom, { min, max });
  for (const chart of charts) applyZoom(chart);
  for (const listener of zoomListeners) listener();
}

// A chart that has nothing in the chosen steps shows all that it has.
function applyZoom(chart) {
  const steps = chart.data[0];
  const isOutside = zoom.min === null || steps[steps.length - 1] <= zoom.min || steps[0] >= zoom.max;
  isSharing = true;
  chart.batch(() => chart.setScale("x", isOutside ? { min: steps[0], max: steps[steps.length - 1] } : zoom));
  isSharing = false;
}

// -- marks

function shadeWarmup(u) {
  if (!run.warmup_steps) return;
  const { left, top, width, height } = u.bbox;
  const right = Math.min(u.valToPos(run.warmup_steps, "x", true), left + width);
  if (right <= left) return;
  u.ctx.save();
  u.ctx.fillStyle = colour("shade");
  u.ctx.fillRect(left, top, right - left, height);
  u.ctx.restore();
}

// Marks that would touch each other are drawn once.
function marked(u, steps, mark) {
  const { left, width } = u.bbox;
  let last = -Infinity;
  for (const step of steps) {
    const x = u.valToPos(step, "x", true);
    if (x < left - 1 || x > left + width + 1 || x - last < 10 * devicePixelRatio) continue;
    mark(x);
    last = x;
  }
}

// A cross at the lower edge: here the value was not a number.
function drawBroken(u, lines) {
  const size = 4 * devicePixelRatio,
    y = u.bbox.top + u.bbox.height - size - 2;
  u.ctx.save();
  u.ctx.strokeStyle = colour("critical");
  u.ctx.lineWidth = 2 * devicePixelRatio;
  for (const line of lines) {
    marked(u, line.broken || [], (x) => {
      u.ctx.beginPath();
      u.ctx.moveTo(x - size, y - size);
      u.ctx.lineTo(x + size, y + size);
      u.ctx.moveTo(x - size, y + size);
      u.ctx.lineTo(x + size, y - size);
      u.ctx.stroke();
    });
  }
  u.ctx.restore();
}

// A small flag at the upper edge: here a health rule spoke.
function drawAlerts(u) {
  const size = 4 * devicePixelRatio,
    y = u.bbox.top;
  u.ctx.save();
  for (const alert of [...run.alerts].reverse()) {
    u.ctx.fillStyle = colour(SEVERITIES[alert.severity]);
    marked(u, alert.steps, (x) => {
      u.ctx.beginPath();
      u.ctx.moveTo(x - size, y - size);
      u.ctx.lineTo(x + size, y - size);
      u.ctx.lineTo(x, y + size);
      u.ctx.fill();
    });
  }
  u.ctx.restore();
}

function drawLimit(u, limit) {
  const y = u.valToPos(limit.value, "y", true);
  u.ctx.save();
  u.ctx.strokeStyle = u.ctx.fillStyle = colour("critical");
  u.ctx.setLineDash([5, 4]);
  u.ctx.beginPath();
  u.ctx.moveTo(u.bbox.left, y);
  u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
  u.ctx.stroke();
  u.ctx.textAlign = "left";
  u.ctx.textBaseline = "alphabetic";
  u.ctx.font = 12 * devicePixelRatio + "px system-ui, sans-serif";
  u.ctx.fillText(limit.label, u.bbox.left + 6, y - 5 * devicePixelRatio);
  u.ctx.restore();
}

// -- the page around a chart

// A figure with a heading of names and values. Arrow keys move the cursor of the focused chart, and so of all.
function chartCard(title, lines, options) {
  const values = lines.map(() => make("b"));
  const where = make("span", { class: "where" });
  const keys = lines.map((line, i) =>
    line.faint
      ? null
      : make("span", { class: "key", title: line.title }, swatch(line), make("span", { text: line.label }), values[i]),
  );
  const canvas = make("div", { class: "plot", tabindex: "0", role: "img" });
  const buttons = make("span", { class: "buttons" });
  const card = make(
    "figure",
    { class: "chart" + (options.wide ? " wide" : "") },
    make(
      "figcaption",
      {},
      make(
        "div",
        { class: "caption" },
        make("h3", { text: title }),
        make("small", { text: options.unit || "" }),
        where,
        buttons,
      ),
      make("div", { class: "keys" }, ...(options.topDown ? keys.reverse() : keys)),
    ),
    canvas,
  );
  options.onvalues = (found, step) => {
    found.forEach((value, i) => {
      values[i].textContent = lines[i].share ? percent(value) : short(value === null ? "not finite" : value);
    });
    where.textContent = step === null ? "" : "step " + step + alertsAt(step);
  };
  canvas.setAttribute(
    "aria-label",
    title +
      ": " +
      lines
        .filter((line) => !line.faint)
        .map(describeLine)
        .join("; "),
  );
  canvas.addEventListener("keydown", (event) => moveCursor(event, canvas));
  card.draw = () => drawLines(canvas, lines, options);
  if (options.canBeLog) {
    const button = make("button", {
      type: "button",
      text: "log",
      title: "Logarithmic scale",
      "aria-pressed": "false",
      onclick: () => {
        options.log = !options.log;
        button.setAttribute("aria-pressed", String(options.log));
        canvas.redraw();
      },
    });
    buttons.append(button);
  }
  return card;
}

function swatch(line) {
  const mark = make("i", { class: "swatch" + (line.dashed ? " dashed" : "") });
  mark.style.color = line.colour;
  return mark;
}

function describeLine(line) {
  const range = extent(line.values);
  return range
    ? line.label +
        " from " +
        short(range[0]) +
        " to " +
        short(range[1]) +
        ", last " +
        short(lastValue(line.values, line.values.length - 1))
    : line.label;
}

function alertsAt(step) {
  const rules = run.alerts.filter((alert) => alert.steps.includes(step)).map((alert) => alert.rule);
  return rules.length ? " · " + rules.join(" ") : "";
}

function moveCursor(event, canvas) {
  const change = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const chart = [...charts].find((one) => one.root.parentNode === canvas);
  if (!change || !chart) return;
  event.preventDefault();
  const steps = chart.data[0];
  const from = chart.cursor.idx === null || chart.cursor.idx === undefined ? steps.length - 1 : chart.cursor.idx;
  const index = Math.min(Math.max(from + change, 0), steps.length - 1);
  chart.setCursor({ left: chart.valToPos(steps[index], "x"), top: 10 }, true, true);
}

function redrawAll() {
  for (const plot of document.querySelectorAll(".plot")) if (plot.redraw) plot.redraw();
}

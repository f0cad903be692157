"use strict";
// Elements, numbers as text, and the state that all parts of the page share. Foreign text is only ever textContent.

const problems = [];
function noteProblem(text) {
  problems.push(String(text));
  document.body.dataset.errors = problems.join("\n");
}
window.addEventListener("error", (event) => noteProblem(event.message));
window.addEventListener("unhandledrejection", (event) => noteProblem(event.reason));
document.addEventListener("securitypolicyviolation", (event) => noteProblem("blocked: " + event.violatedDirective));

const report = JSON.parse(document.getElementById("data").textContent);
// Keys of these are foreign: none of them may find something that every object inherits.
for (const names of [report.about, ...report.runs.map((one) => one.series)]) Object.setPrototypeOf(names, null);
const run = report.runs[0];
const otherRun = report.runs[1];

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// The parser knows the namespace of SVG; writing it out would put an address into a page that has none.
const SVG_NAMESPACE = (() => {
  const template = document.createElement("template");
  template.innerHTML = "<svg></svg>";
  return template.content.firstChild.namespaceURI;
})();
function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") element.textContent = value;
    else if (name === "fill" || name === "stroke") element.style[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function section(name) {
  return document.querySelector("#" + name + " > .content");
}

function missing(name, ...sentences) {
  section(name).append(make("p", { class: "missing" }, ...sentences));
}

function select(label, options, value, onchange) {
  const control = make("select", { "aria-label": label, onchange: () => onchange(control.value) });
  for (const [key, text] of options) control.append(make("option", { value: key, text, selected: key === value }));
  return make("label", { class: "control" }, make("span", { text: label }), control);
}

// Buttons of which one is pressed.
function choice(label, options, value, onchange) {
  const buttons = options.map(([key, text]) =>
    make("button", {
      type: "button",
      text,
      "aria-pressed": String(key === value),
      onclick: (event) => {
        for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
        onchange(key);
      },
    }),
  );
  return make(
    "div",
    { class: "control choice", role: "group", "aria-label": label },
    make("span", { text: label }),
    ...buttons,
  );
}

// A table whose cells are text or elements; columns that begin with "#" hold numbers.
function table(columns, rows, attributes) {
  const isNumber = columns.map((name) => name.startsWith("#"));
  const head = columns.map((name, i) =>
    make("th", { scope: "col", class: isNumber[i] ? "number" : null, text: name.replace(/^#/, "") }),
  );
  const body = rows.map((cells) =>
    make(
      "tr",
      {},
      ...cells.map((cell, i) => {
        const at = make("td", { class: isNumber[i] ? "number" : null });
        at.append(cell === null || cell === undefined ? "" : cell);
        return at;
      }),
    ),
  );
  return make(
    "div",
    { class: "scroll" },
    make("table", attributes, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)),
  );
}

// -- numbers

function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(1);
  if (size >= 0.001) return String(Number(value.toPrecision(4)));
  return value.toExponential(2).replace("e-", "e−");
}

function tick(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return Number((value / 1e6).toPrecision(4)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(4)) + "k";
  if (size < 0.001) return value.toExponential().replace(/(\.\d{2})\d+/, "$1");
  return String(Number(value.toPrecision(6)));
}

function percent(value) {
  return (100 * value).toFixed(1) + " %";
}

// Seconds as text, in a unit that suits `largest`: numbers below each other should be comparable.
function seconds(value, largest = value) {
  if (largest >= 7200) return (value / 3600).toFixed(2) + " h";
  if (largest >= 300) return (value / 60).toFixed(1) + " min";
  if (largest >= 0.9995) return value.toFixed(largest >= 100 ? 1 : 2) + " s";
  return (1000 * value).toFixed(largest >= 0.1 ? 0 : 1) + " ms";
}

function inUnit(value, unit) {
  if (typeof value === "string") return value;
  if (unit === "share") return percent(value);
  if (unit === "GiB") return value.toFixed(value < 10 ? 2 : 1) + " GiB";
  if (unit === "count") return Math.round(value).toLocaleString("en");
  return short(value);
}

// Control characters and those that turn the direction of text are shown, not obeyed.
function visible(text) {
  return text.replace(
    /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (found) => {
      const code = found.charCodeAt(0);
      return code < 32 ? String.fromCharCode(0x2400 + code) : "⟨" + code.toString(16) + "⟩";
    },
  );
}

function lastStep() {
  return Math.max(1, ...run.grids.map((deltas) => deltas.reduce((sum, delta) => sum + delta, 0)));
}

// -- colours

const PALETTE_SIZE = 10;
function colour(name) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
}
function seriesColour(index) {
  return colour("c" + (index % PALETTE_SIZE));
}

// A phase has one colour in the stack, the timeline and the tables.
const phaseOrder = run.time ? run.time.table.map((row) => row.name).filter((name) => name !== "other") : [];
function phaseVariable(name) {
  if (name === "other") return "var(--rest)";
  if (!phaseOrder.includes(name)) phaseOrder.push(name);
  return "var(--c" + (phaseOrder.indexOf(name) % PALETTE_SIZE) + ")";
}
function phaseColour(name) {
  return colour(phaseVariable(name).slice(6, -1));
}

const SEVERITIES = { 1: "info", 2: "warning", 3: "critical" };

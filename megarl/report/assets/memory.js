"use strict";
// Memory: how full each device was in each phase, how it went over the steps, and the host's processes.

const MEASURES = {
  max_reserved: "peak reserved",
  max_allocated: "peak allocated",
  left_allocated: "left after offloading",
};
const FULL = 0.92;
const memoryView = { measure: null, statistic: "peak", row: 0 };

function drawMemory() {
  const place = section("memory");
  const host = hostCard();
  if (run.memory) {
    const heat = make("div", { class: "plot heat" });
    const curve = make("div", { class: "charts" });
    const measures = Object.keys(MEASURES).filter((measure) => run.memory.measures[measure]);
    memoryView.measure = measures[0];
    memoryView.row = fullestRow();
    const show = () => {
      drawHeat(heat, show);
      drawMemoryCurve(curve);
    };
    const change = (key) => (value) => {
      memoryView[key] = value;
      show();
    };
    heat.redraw = () => drawHeat(heat, show);
    place.append(
      make(
        "div",
        { class: "controls" },
        choice(
          "Memory",
          measures.map((measure) => [measure, MEASURES[measure]]),
          memoryView.measure,
          change("measure"),
        ),
        choice(
          "Of",
          [
            ["peak", "all steps (maximum)"],
            ["latest", "the latest step"],
          ],
          "peak",
          change("statistic"),
        ),
        select(
          "Curve of",
          run.memory.phases.map((phase, i) => [String(i), phase]),
          String(memoryView.row),
          (value) => change("row")(Number(value)),
        ),
      ),
      heat,
      curve,
    );
    show();
  } else {
    missing(
      "memory",
      "No memory of devices in this ledger: ",
      make("code", { text: "metrics.memory: device" }),
      " records it on GPUs.",
    );
  }
  if (host) {
    place.append(make("div", { class: "charts" }, host));
    host.draw();
  }
}

function fullestRow() {
  const rows = run.memory.measures[memoryView.measure].peak.map((row) => Math.max(...row.map((value) => value || 0)));
  return rows.indexOf(Math.max(...rows));
}

function drawHeat(place, show) {
  const { devices, phases, measures } = run.memory;
  const rows = measures[memoryView.measure][memoryView.statistic];
  const highest = Math.max(1e-9, ...rows.flat().map((value) => value || 0));
  const known = devices.every((device) => run.capacity[device]);
  const left = 235,
    top = 26,
    right = 10;
  const width = place.clientWidth || 1000;
  const cell = Math.min(160, (width - left - right) / devices.length),
    height = 30;
  const root = svg("svg", {
    width,
    height: top + phases.length * height + 8,
    role: "img",
    "aria-label":
      MEASURES[memoryView.measure] + " memory, " + phases.length + " phases and " + devices.length + " devices",
  });
  const every = Math.ceil(26 / cell);
  devices.forEach((device, i) => {
    if (i % every === 0)
      root.append(
        svg("text", {
          x: left + (i + 0.5) * cell,
          y: 16,
          class: "tick middle",
          text: cell > 60 ? "device " + device : device,
        }),
      );
  });
  phases.forEach((phase, at) => {
    const y = top + at * height;
    const label = svg("text", {
      x: left - 10,
      y: y + height / 2 + 4,
      class: "tick end" + (at === memoryView.row ? " chosen" : ""),
      text: phase,
    });
    root.append(label);
    devices.forEach((device, i) => {
      const value = rows[at][i];
      if (value === null) return;
      const share = value / (known ? run.capacity[device] : highest);
      const box = svg(
        "g",
        { class: "cell" },
        svg("title", {
          text:
            "device " +
            device +
            ", " +
            phase +
            "\n" +
            inUnit(value, "GiB") +
            (known ? " of " + inUnit(run.capacity[device], "GiB") + ", " + percent(share) : ""),
        }),
      );
      box.append(
        svg("rect", {
          x: left + i * cell + 1,
          y: y + 1,
          width: Math.max(1, cell - 2),
          height: height - 2,
          rx: 2,
          fill: heatColour(share),
          class: known && share >= FULL ? "full" : "",
        }),
      );
      if (cell >= 44)
        box.append(
          svg("text", {
            x: left + (i + 0.5) * cell,
            y: y + height / 2 + 4,
            class: "middle cellText " + (share > 0.55 ? "onDark" : "onLight"),
            text: cell >= 90 && known ? value.toFixed(1) + " · " + Math.round(100 * share) + " %" : value.toFixed(1),
          }),
        );
      box.addEventListener("click", () => {
        memoryView.row = at;
        section("memory").querySelector("select").value = String(at);
        show();
      });
      root.append(box);
    });
  });
  place.replaceChildren(root, heatKey(known, highest));
}

// From pale to dark blue in even steps of lightness: it reads the same without colour vision.
function heatColour(share) {
  const t = Math.min(1, Math.max(0, share));
  return "hsl(" + (205 + 20 * t) + " " + (55 + 15 * t) + "% " + (93 - 68 * t) + "%)";
}

function heatKey(known, highest) {
  const steps = Array.from({ length: 11 }, (_, i) => {
    const box = make("i");
    box.style.background = heatColour(i / 10);
    return box;
  });
  const text = known
    ? "100 % of the device"
    : inUnit(highest, "GiB") + " (capacities are unknown without devices.json)";
  return make(
    "div",
    { class: "heatKey" },
    make("span", { text: "0" }),
    ...steps,
    make("span", { text }),
    known ? make("span", { class: "fullKey", text: "above " + 100 * FULL + " %" }) : null,
    make("span", { text: "Numbers are GiB. Click on a cell to see its phase over the steps." }),
  );
}

function drawMemoryCurve(place) {
  for (const plot of place.querySelectorAll(".plot"))
    for (const chart of [...charts]) if (chart.root.parentNode === plot) forget(chart);
  place.replaceChildren();
  const name = run.memory.measures[memoryView.measure].names[memoryView.row];
  if (!name) return;
  const found = Object.keys(run.series).filter((one) => one.startsWith(name + "/"));
  const lines = found.map((one, i) => {
    const label = one.slice(name.length + 1);
    return {
      ...readSeries(run, one),
      label: label.startsWith("[") ? label.slice(1, -1) : "device " + label,
      colour: seriesColour(i),
    };
  });
  const capacities = Object.values(run.capacity);
  const limit = capacities.length
    ? { value: Math.min(...capacities), label: "capacity, " + inUnit(Math.min(...capacities), "GiB") }
    : null;
  const top = Math.max(limit ? limit.value : 0, ...lines.map((line) => (extent(line.values) || [0, 0])[1]));
  const card = chartCard(run.memory.phases[memoryView.row] + ", " + MEASURES[memoryView.measure], lines, {
    wide: true,
    unit: "GiB",
    height: 220,
    limit,
    marks: true,
    range: () => [0, top * 1.18 || 1],
  });
  place.append(card);
  card.draw();
}

function hostCard() {
  const names = Object.keys(run.series).filter((name) => /^memory\/cpu\/.+\/end\/rss$/.test(name));
  if (!names.length) return null;
  const lines = names.map((name) => {
    const phase = name.slice("memory/cpu/".length, -"/end/rss".length);
    return { ...readSeries(run, name), label: phase, title: name, colour: phaseColour(phase) };
  });
  return chartCard("Host memory of the largest rank at the end of each phase", lines, {
    wide: true,
    unit: "GiB",
    height: 220,
    marks: true,
  });
}

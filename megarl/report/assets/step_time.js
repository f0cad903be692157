"use strict";
// Seconds of every phase, stacked over the steps, and a table of where all the time went.

function drawStepTime() {
  const time = run.time;
  if (!time) return missing("step-time", "There are no wall times (timing_s/step_wall) in this ledger.");
  const place = section("step-time");
  const layers = time.layers.filter((layer) => layer.seconds.some((value) => value > 0));
  const sums = layers.map((_, i) =>
    time.steps.map((_, at) => layers.slice(0, i + 1).reduce((sum, layer) => sum + layer.seconds[at], 0)),
  );
  // The tallest sum first: each one is painted over by the next, which leaves the layer between them.
  const lines = layers
    .map((layer, i) => ({
      label: layer.name,
      steps: time.steps,
      values: sums[i],
      colour: phaseColour(layer.name),
      fill: phaseColour(layer.name),
      width: 0.5,
      own: layer.seconds,
    }))
    .reverse();
  const top = extent(sums[sums.length - 1]);
  const options = {
    wide: true,
    height: 300,
    topDown: true,
    range: () => [0, quantile(sums[sums.length - 1], 0.99, top[1])],
  };
  const card = chartCard(
    "Seconds per step" + (time.stretch > 1 ? ", mean of " + time.stretch + " steps" : ""),
    lines,
    options,
  );
  const show = options.onvalues;
  options.onvalues = (found, step) => {
    const at = step === null ? time.steps.length - 1 : time.steps.indexOf(step);
    show(
      lines.map((line) => line.own[at < 0 ? time.steps.length - 1 : at]),
      step,
    );
  };
  place.append(make("div", { class: "charts" }, card), phaseTable(time));
  card.draw();
}

// One slow step must not flatten all others: what is far above is cut off, and the axis says how high it was.
function quantile(values, share, highest) {
  const sorted = [...values].sort((a, b) => a - b);
  const high = sorted[Math.floor(share * (sorted.length - 1))];
  return (highest > 3 * high && high > 0 ? 1.5 * high : highest) * 1.05 || 1;
}

function phaseTable(time) {
  const largestMean = Math.max(...time.table.map((row) => row.mean));
  const total = (value) => (value === undefined ? "–" : seconds(value, time.wall_total));
  const mean = (value) => (value === undefined ? "–" : seconds(value, largestMean));
  const rows = time.table
    .filter((row) => row.total > 0)
    .map((row) => {
      const name = make(
        "span",
        { class: "key" },
        swatch({ colour: phaseVariable(row.name) }),
        make("code", { text: row.name }),
      );
      const moving = row.execute === undefined ? undefined : (row.onload || 0) + (row.offload || 0);
      const skew = row.skew === undefined ? undefined : row.skew / Math.max(row.steps, 1);
      return [
        name,
        total(row.total),
        shareBar(row),
        percent(row.share),
        total(row.execute),
        total(moving),
        String(row.steps),
        mean(row.mean),
        mean(skew),
      ];
    });
  rows.push([
    make("b", { text: "all steps" }),
    make("b", { text: seconds(time.wall_total) }),
    "",
    "",
    "",
    "",
    "",
    "",
    "",
  ]);
  return table(
    ["phase", "#total", "", "#share", "#at work", "#moving states", "#steps", "#mean of a step", "#mean skew of ranks"],
    rows,
  );
}

function shareBar(row) {
  const bar = make("i", { class: "bar" });
  bar.style.width = Math.min(100, 100 * row.share).toFixed(1) + "%";
  bar.style.background = phaseVariable(row.name);
  return make("div", { class: "track" }, bar);
}

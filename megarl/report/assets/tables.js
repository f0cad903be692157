"use strict";
// Who this run is, its headline numbers, alerts, configuration, devices and the comparison.

function moment(time) {
  return time === null ? "" : new Date(1000 * time).toLocaleString("sv-SE").slice(0, 16);
}

function drawIdentity() {
  const parts = [
    run.layout,
    run.device,
    run.started === null ? "" : moment(run.started) + " to " + moment(run.ended),
    run.run_id ? "id " + run.run_id : "",
    otherRun ? "compared with " + otherRun.name : "",
  ];
  document
    .getElementById("identity")
    .append(make("h1", { text: visible(run.name) }), make("p", { text: visible(parts.filter(Boolean).join("  ·  ")) }));
  if (run.num_damaged)
    document
      .getElementById("tiles")
      .before(make("p", { class: "missing", text: run.num_damaged + " damaged lines of the ledger were left out." }));
  document.querySelector("footer").textContent =
    "Written by megarl " +
    report.version +
    ", " +
    moment(report.written) +
    ". This page loads nothing from the network.";
}

function drawTiles() {
  const tiles = run.tiles.map((tile) =>
    make(
      "div",
      { class: "tile " + tile.tone },
      make("span", { class: "label", text: tile.label }),
      make("strong", { text: inUnit(tile.value, tile.unit) }),
      make("span", { class: "detail", text: tile.detail }),
    ),
  );
  document.getElementById("tiles").append(...tiles);
}

function drawComparison() {
  if (!otherRun) return;
  const { numbers, settings } = report.comparison;
  const rows = numbers.map((row) => {
    const units = row.values.filter(Boolean).map((fact) => fact.unit);
    return [
      row.label,
      ...row.values.map((fact) => (fact ? inUnit(fact.value, fact.unit) : "–")),
      row.difference === undefined ? "–" : difference(row.difference, units[0]),
    ];
  });
  const place = section("comparison");
  place.append(
    make(
      "div",
      { class: "columns" },
      make(
        "div",
        {},
        make("h3", { text: "Headline numbers" }),
        table(["", "#" + run.name, "#" + otherRun.name, "#difference"], rows),
      ),
      make(
        "div",
        {},
        make("h3", { text: "Settings that differ" }),
        settings.length
          ? table(
              ["setting", run.name, otherRun.name],
              settings.map(([name, ours, theirs]) => [make("code", { text: name }), visible(ours), visible(theirs)]),
            )
          : make("p", { class: "missing", text: "None." }),
      ),
    ),
  );
}

function difference(value, unit) {
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  const text = unit === "share" ? (100 * size).toFixed(1) + " points" : inUnit(size, unit);
  return /[1-9]/.test(text) ? (value > 0 ? "+" : "−") + text : "0";
}

function drawAlertTable() {
  if (!run.alerts.length) return missing("alerts", "No health rule has spoken.");
  const rows = run.alerts.map((alert) => [
    make("span", { class: "badge " + SEVERITIES[alert.severity], text: SEVERITIES[alert.severity] }),
    make("code", { text: alert.rule }),
    visible(alert.message) || "–",
    String(alert.count),
    String(alert.first),
    String(alert.last),
    whenStrip(alert),
  ]);
  section("alerts").append(table(["severity", "rule", "message", "#times", "#first step", "#last step", "when"], rows));
}

function whenStrip(alert) {
  const width = 180,
    last = lastStep();
  const root = svg("svg", {
    width,
    height: 16,
    role: "img",
    "aria-label": "steps " + alert.first + " to " + alert.last,
  });
  root.append(svg("rect", { x: 0, y: 7, width, height: 2, class: "idle" }));
  for (const step of alert.steps)
    root.append(
      svg("rect", {
        x: (step / last) * (width - 2),
        y: 1,
        width: 2,
        height: 14,
        fill: "var(--" + SEVERITIES[alert.severity] + ")",
      }),
    );
  return root;
}

function drawConfig() {
  if (!run.config)
    return missing(
      "config",
      "There is no readable ",
      make("code", { text: "resolved.yaml" }),
      " in the run directory.",
    );
  const text = make("pre", { tabindex: "0" });
  for (const line of run.config.split("\n")) {
    const found = line.match(/^(\s*(?:- )?)([\w.]+:)(.*)$/);
    if (found) text.append(found[1], make("span", { class: "name", text: found[2] }), visible(found[3]) + "\n");
    else text.append(visible(line) + "\n");
  }
  section("config").append(
    make("details", {}, make("summary", { text: "resolved.yaml, " + run.config.split("\n").length + " lines" }), text),
  );
}

function drawDevices() {
  if (!run.devices.length)
    return missing("devices", "There is no ", make("code", { text: "devices.json" }), " in the run directory.");
  const fields = Object.keys(run.devices[0]);
  const isNumber = fields.map((field) => run.devices.every((row) => typeof row[field] === "number"));
  const rows = run.devices.map((row) =>
    fields.map((field) =>
      row[field] === undefined ? "–" : typeof row[field] === "number" ? short(row[field]) : visible(row[field]),
    ),
  );
  const list = table(
    fields.map((field, i) => (isNumber[i] ? "#" : "") + field.replace(/_/g, " ")),
    rows,
  );
  section("devices").append(
    make(
      "details",
      { open: run.devices.length <= 8 },
      make("summary", { text: run.devices.length + " devices" }),
      list,
    ),
  );
}

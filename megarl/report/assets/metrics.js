"use strict";
// Every metric of the ledger: found by any of its spellings, drawn on demand.

const MAX_ROWS = 400;

function drawMetrics() {
  const names = [...new Set(report.runs.flatMap((from) => Object.keys(from.series)))].sort();
  const list = make("div", { class: "metricList" });
  const count = make("span", { class: "hint", role: "status" });
  const box = make("input", {
    type: "search",
    placeholder: "critic/score, tokens/response_length, skew …",
    "aria-label": "Find a metric",
    oninput: () => show(),
  });
  const rows = new Map();
  const show = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = names.filter((name) => words.every((word) => searchText(name).includes(word)));
    const shown = found.slice(0, MAX_ROWS);
    count.textContent =
      found.length +
      " of " +
      names.length +
      " metrics" +
      (shown.length < found.length ? ", the first " + MAX_ROWS + " are shown" : "");
    list.replaceChildren(
      ...shown.map((name) => {
        if (!rows.has(name)) rows.set(name, metricRow(name));
        return rows.get(name);
      }),
    );
  };
  section("metrics").append(make("div", { class: "controls" }, box, count), list);
  show();
}

const searchTexts = new Map();
function searchText(name) {
  if (!searchTexts.has(name)) {
    const about = report.about[name];
    searchTexts.set(name, (name + " " + (about ? about.aliases.join(" ") + " " + about.doc : "")).toLowerCase());
  }
  return searchTexts.get(name);
}

function metricRow(name) {
  const about = report.about[name] || { unit: "", doc: "", aliases: [] };
  const series = report.runs.map((from) => readSeries(from, name)).find(Boolean);
  const range = extent(series.values);
  const aliases = about.aliases.length ? " · also " + about.aliases.join(", ") : "";
  const button = make(
    "button",
    { type: "button", class: "metric", "aria-expanded": "false", onclick: toggle },
    make("code", { text: visible(name) }),
    make("span", { class: "doc", text: about.doc + aliases }),
    make("span", { class: "number", text: short(lastValue(series.values, series.values.length - 1)) }),
    make("span", { class: "number range", text: range ? short(range[0]) + " … " + short(range[1]) : "" }),
    make("span", { class: "unit", text: about.unit === "1" ? "" : about.unit }),
  );
  const place = make("div", { class: "charts" });
  function toggle() {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) {
      for (const chart of [...charts]) if (place.contains(chart.root)) forget(chart);
      place.replaceChildren();
    } else {
      const card = curveCard(visible(name), [name], { wide: false, height: 220 });
      card.classList.add("wide");
      place.append(card);
      card.draw();
    }
  }
  return make("div", { class: "metricRow" }, button, place);
}

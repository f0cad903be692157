"use strict";
// Draws the page. A part that fails says so in its place and leaves the others alone.

const PARTS = [
  ["identity", drawIdentity],
  ["tiles", drawTiles],
  ["comparison", drawComparison],
  ["curves", drawCurves],
  ["step-time", drawStepTime],
  ["timeline", drawTimeline],
  ["memory", drawMemory],
  ["alerts", drawAlertTable],
  ["samples", drawSamples],
  ["metrics", drawMetrics],
  ["config", drawConfig],
  ["devices", drawDevices],
];

for (const [name, draw] of PARTS) {
  try {
    draw();
  } catch (error) {
    noteProblem(name + ": " + error.stack);
    const place = section(name);
    if (place)
      place.append(
        make("p", { class: "missing", text: "This part of the report could not be drawn: " + error.message }),
      );
  }
}

// A long warm-up would squeeze what the reader came for into a corner.
if (run.warmup_steps > 0.4 * lastStep() && run.warmup_steps < lastStep()) setZoom(run.warmup_steps, lastStep());

let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(redrawAll, 150);
});
// Colours of lines are painted into the charts: another colour scheme means painting them anew.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
document.body.dataset.ready = "true";

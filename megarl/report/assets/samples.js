"use strict";
// Rollouts: tokens coloured by how probable the policy found them, or by what they earned.

const sampleView = { step: 0, colouring: "logprob", filter: "" };
const MAX_GROUPS = 30;

function drawSamples() {
  const steps = run.samples;
  if (!steps.length)
    return missing(
      "samples",
      "No samples were recorded: there is no ",
      make("code", { text: "samples/" }),
      " in the run directory. Set rollout.kept_groups above 0.",
    );
  const place = section("samples");
  const list = make("div", { class: "groups" });
  const count = make("span", { class: "hint", role: "status" });
  const key = make("div", { class: "keys" });
  const show = () => {
    key.replaceChildren(...colourKey());
    showGroups(list, count);
  };
  sampleView.step = steps.length - 1;
  const box = make("input", {
    type: "search",
    placeholder: "text of a prompt or response",
    "aria-label": "Filter samples",
    oninput: () => {
      sampleView.filter = box.value;
      show();
    },
  });
  place.append(
    make(
      "div",
      { class: "controls" },
      select(
        "Step",
        steps.map((one, i) => [String(i), String(one.step)]),
        String(sampleView.step),
        (value) => {
          sampleView.step = Number(value);
          show();
        },
      ),
      choice(
        "Colour",
        [
          ["logprob", "log-prob"],
          ["advantage", "advantage"],
          ["none", "none"],
        ],
        sampleView.colouring,
        (value) => {
          sampleView.colouring = value;
          show();
        },
      ),
      box,
      count,
    ),
    key,
    list,
  );
  show();
}

function showGroups(list, count) {
  const { num_groups: numGroups, groups } = run.samples[sampleView.step];
  const wanted = sampleView.filter.toLowerCase();
  const found = groups
    .map((group) => {
      const inPrompt = (group.prompt + " " + (group.answer || "")).toLowerCase().includes(wanted);
      return {
        group,
        samples: group.samples.filter((sample) => inPrompt || sample.tokens.join("").toLowerCase().includes(wanted)),
      };
    })
    .filter((one) => one.samples.length);
  const numSamples = found.reduce((sum, one) => sum + one.samples.length, 0);
  count.textContent =
    numSamples +
    " samples of " +
    found.length +
    " prompts" +
    (numGroups > groups.length ? "; the step had " + numGroups + " prompts" : "");
  list.replaceChildren(...found.slice(0, MAX_GROUPS).map((one) => groupCard(one.group, one.samples)));
}

function groupCard(group, samples) {
  const limit = largestAdvantage();
  const answer =
    group.answer === null
      ? null
      : make("span", { class: "answer" }, "answer ", make("code", { text: visible(group.answer) }));
  return make(
    "article",
    { class: "group" },
    make("div", { class: "prompt" }, make("span", { class: "text", text: visible(group.prompt) }), answer),
    ...samples.map((sample) => sampleRow(sample, limit)),
  );
}

function sampleRow(sample, limit) {
  const facts = make(
    "div",
    { class: "facts" },
    fact("reward", short(sample.reward)),
    fact("advantage", signed(sample.advantage)),
    fact("finish", sample.finish, sample.finish === "stop" ? "" : "warning"),
    fact("tokens", String(sample.num_tokens)),
  );
  const text = make("div", { class: "response" });
  sample.tokens.forEach((token, i) => text.append(tokenSpan(sample, token, i, limit)));
  if (sample.num_tokens > sample.tokens.length)
    text.append(
      make("span", { class: "hint", text: " … " + (sample.num_tokens - sample.tokens.length) + " more tokens" }),
    );
  return make("div", { class: "sample" }, facts, text);
}

function fact(label, value, tone) {
  return make("span", { class: tone || "" }, make("small", { text: label + " " }), make("b", { text: value }));
}

function signed(value) {
  return value > 0 ? "+" + short(value) : short(value);
}

function tokenSpan(sample, token, i, limit) {
  const logprob = sample.logprobs[i];
  if (logprob === null)
    return make("span", {
      class: "foreign",
      title: "not written by the policy",
      text: visible(token).replace(/\n/g, "⏎\n"),
    });
  const advantage = sample.advantages ? sample.advantages[i] : sample.advantage;
  const lines = ["log-prob " + short(logprob) + " (p = " + Math.exp(logprob).toPrecision(3) + ")"];
  if (sample.old_logprobs) lines.push("by the trainer " + short(sample.old_logprobs[i]));
  lines.push("advantage " + signed(advantage));
  const span = make("span", { class: "token", title: lines.join("\n"), text: visible(token).replace(/\n/g, "⏎\n") });
  const [hue, strength] = tokenColour(logprob, advantage, limit);
  if (strength > 0.02) span.style.backgroundColor = "rgb(" + colour(hue) + " / " + (0.75 * strength).toFixed(2) + ")";
  return span;
}

// A sure token is plain, a surprising one orange; blue earned, red lost.
const SURPRISE = 5;
function tokenColour(logprob, advantage, limit) {
  if (sampleView.colouring === "logprob") return ["surprise", Math.min(1, Math.sqrt(-logprob / SURPRISE) || 0)];
  if (sampleView.colouring === "advantage")
    return [advantage < 0 ? "lost" : "earned", Math.min(1, Math.abs(advantage) / limit)];
  return ["earned", 0];
}

function largestAdvantage() {
  const all = run.samples[sampleView.step].groups.flatMap((group) =>
    group.samples.flatMap((sample) => sample.advantages || [sample.advantage]),
  );
  return all.reduce((largest, value) => Math.max(largest, Math.abs(value) || 0), 1e-9);
}

function colourKey() {
  if (sampleView.colouring === "none") return [];
  const steps =
    sampleView.colouring === "logprob"
      ? [
          ["p = 1", 0, 0],
          ["0.9", Math.log(0.9), 0],
          ["0.5", Math.log(0.5), 0],
          ["0.1", Math.log(0.1), 0],
          ["0.01", Math.log(0.01), 0],
        ]
      : [-1, -0.5, 0, 0.5, 1].map((share) => [signed(share * largestAdvantage()), 0, share]);
  return steps.map(([label, logprob, share]) => {
    const [hue, strength] = tokenColour(logprob, share, 1);
    const mark = make("span", { class: "token sampleKey", text: label });
    mark.style.backgroundColor = "rgb(" + colour(hue) + " / " + (0.75 * strength).toFixed(2) + ")";
    return mark;
  });
}

// The head of the page: did it learn, what did it cost, how does it stand.

const STATUS = {
  completed: ["completed", "good"],
  running: ["still running", "live"],
  interrupted: ["interrupted", "warn"],
  stopped: ["stopped", "warn"],
  failed: ["failed", "bad"],
};

const SIGNS = { good: "▲", warn: "■", bad: "▼", muted: "…" };

function verdictBanner({ verdict }) {
  return h("div", { class: `verdict ${verdict.mood}` }, h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[verdict.mood]),
    h("div", {}, h("h2", {}, verdict.headline), h("p", {}, verdict.about)));
}

function tile(label, value, below, mood) {
  return h("div", { class: "card tile" }, h("div", { class: "muted" }, label), h("div", { class: "big" }, value),
    h("div", { class: `below ${mood ?? "muted"}` }, below || "\u00a0"));
}

function tiles(run) {
  const { summary } = run;
  const { series } = run.metrics;
  const found = [];
  for (const { source, metric, before, after } of summary.validation ?? []) {
    const known = before !== null && after !== null;
    const change = known ? after - before : null;
    const rows = summary.validation_rows ? `, ${summary.validation_rows}` : "";
    const from = known ? `${formatSigned(change, 3)} from ${formatScore(before)}` : before === null ? "not measured before training" : "before training";
    found.push(tile(`${source} ${metric.replace(/mean@(\d+)/, "mean of $1")}`, formatScore(after ?? before), from + rows,
      known && Math.abs(change) >= 5e-4 ? (change > 0 ? "good" : "bad") : null));
  }
  const reward = lastValue(firstOf(series, "reward", "critic/rewards/mean") ?? []);
  if (reward !== null) found.push(tile("Training reward", formatScore(reward), "latest step"));
  const planned = summary.total_steps;
  found.push(tile("Steps", formatNumber(summary.steps), planned ? `of ${formatNumber(planned)} planned` : ""));
  if (summary.training_s) found.push(tile("Time", formatSeconds(summary.training_s), summary.tokens_per_s ? `${formatNumber(Math.round(summary.tokens_per_s))} tokens/s` : ""));
  const length = lastValue(firstOf(series, "response_length/mean") ?? []);
  const cut = lastValue(firstOf(series, "response_length/clip_ratio") ?? []);
  if (length !== null) found.push(tile("Response length", formatTokens(length), cut === null ? "tokens" : `tokens, ${formatShare(cut)} truncated`));
  const memory = lastValue(firstOf(series, "perf/max_memory_allocated_gb") ?? []);
  if (memory !== null) found.push(tile("Peak memory", formatGib(memory), "per device"));
  return h("div", { class: "tiles" }, found);
}

/** One bar with the share of each stage in the whole time, validation included. */
function timeBar(run) {
  const stages = Object.entries(run.summary.stages ?? {}).filter(([, { share }]) => share);
  if (stages.length === 0) return null;
  const large = stages.filter(([, { share }], i) => share >= 0.01 && i < 7);
  const rest = stages.filter((each) => !large.includes(each)).reduce((sum, [, { seconds }]) => sum + seconds, 0);
  const whole = stages.reduce((sum, [, { seconds }]) => sum + seconds, 0);
  const colors = stageColors(large.map(([name]) => name));
  const rows = large.map(([name, { seconds }]) => [name === "testing" ? "validation" : name, seconds, colors[name]]);
  if (rest >= 0.0005 * whole) rows.push(["other", rest, 8]);
  return h("section", { class: "card" }, h("h3", {}, "Where the time went"),
    h("div", { class: "sharebar", "aria-hidden": "true" }, rows.map(([, seconds, color]) => h("i", { class: `c${color}`, style: { "flex-grow": seconds } }))),
    h("ul", { class: "shares" }, rows.map(([name, seconds, color]) => h("li", {}, h("i", { class: `swatch block c${color}` }), name,
      h("b", {}, formatShare(Math.round(1000 * seconds / whole) / 1000)), h("span", { class: "muted" }, formatSeconds(seconds))))));
}

/** What the run was warned of, each kind as last told; the advice is folded away. */
function warnings(told) {
  if (told.length === 0) return "";
  const latest = new Map(told.map((each) => [each.name, each]));
  const times = (name) => {
    const count = told.filter((each) => each.name === name).length;
    return count > 1 ? ` (${count} times)` : "";
  };
  return h("section", { class: "notice warnings" }, h("h3", {}, plural(latest.size, "warning")),
    [...latest.values()].map(({ step, name, seen, meaning, remedies }) => h("details", {},
      h("summary", {}, h("span", { class: "muted" }, `step ${step} · `), name, times(name), ": ", h("span", { class: "seen" }, seen)),
      h("p", {}, meaning), h("ul", {}, (remedies ?? []).map((text) => h("li", {}, text))))));
}

/** From which machine to which the run was resumed: the dotted lines in the curves. */
function resumes(rows) {
  if (rows.length === 0) return "";
  const cells = ({ step, from, to, difference, mood }) => [h("td", {}, formatNumber(step)), h("td", {}, from), h("td", {}, to), h("td", { class: mood }, difference)];
  return h("section", { class: "card resumes" }, h("h3", {}, "Resumes"),
    h("p", { class: "muted" }, "Dotted lines in the curves. Differences are those of the log-probs of a few sequences, by the weights of the checkpoint."),
    table(["After step", "Saved on", "Resumed on", "Difference"], rows.map((row) => h("tr", {}, cells(row)))));
}

function overview(run, view, openStep) {
  const { steps, series } = run.metrics;
  const charts = mainCharts(series, steps, run.kl_clamp);
  const absent = charts.filter((spec) => spec.series.length === 0 && spec.missing);
  const panel = h("div", {}, h("div", { class: "head" }, verdictBanner(run), tiles(run)));
  if (run.status === "stopped" && steps.length > 0) {
    panel.append(h("p", { class: "notice" }, `The run ended after step ${steps[steps.length - 1]} without a closing summary: it was killed, or another machine runs it. `
      + "Started again with the same trainer.output_dir it resumes."));
  }
  panel.append(warnings(run.warnings));
  run.problems.forEach((text) => panel.append(h("p", { class: "notice" }, text)));
  if (steps.length === 0) return panel;
  const grid = h("div", { class: "charts" }, charts.filter((spec) => spec.series.length > 0).map((spec) => new Chart(view, spec).element));
  panel.append(chartBar(view, openStep), grid, timeBar(run) ?? "", resumes(run.resumes));
  if (absent.length > 0) {
    panel.append(h("p", { class: "muted absent" }, "Not recorded: ", absent.map((spec) => `${spec.title} (${spec.missing})`).join("; "), "."));
  }
  panel.append(allMetrics(view, series), announcer);
  return panel;
}

/** Smoothing, zoom and the pinned step, for all charts. */
function chartBar(view, openStep) {
  const long = view.steps.length > 60; // so many points hide their trend in their noise
  const weight = h("output", {}, "0.80");
  const range = h("input", { type: "range", min: 0.1, max: 0.98, step: 0.02, value: 0.8, disabled: !long, "aria-label": "strength of smoothing",
    oninput: () => { weight.textContent = Number(range.value).toFixed(2); view.setSmoothing(Number(range.value)); } });
  const toggle = h("input", { type: "checkbox", id: "smooth", checked: long, onchange: () => {
    range.disabled = !toggle.checked;
    view.setSmoothing(toggle.checked ? Number(range.value) : 0);
  } });
  if (long) view.setSmoothing(0.8);
  const reset = h("button", { type: "button", hidden: true, onclick: () => view.reset() }, "Show all steps");
  const pinned = h("button", { type: "button", class: "primary", hidden: true, onclick: () => openStep(view.steps[view.pinned]) });
  const unpin = h("button", { type: "button", hidden: true, onclick: () => view.pin(null) }, "Unpin");
  view.onchange = () => {
    reset.hidden = !view.zoomed;
    pinned.hidden = unpin.hidden = view.pinned === null;
    if (view.pinned !== null) pinned.textContent = `Groups of step ${view.steps[view.pinned]}`;
  };
  return h("div", { class: "bar chartbar" }, h("label", { for: "smooth", class: "check" }, toggle, "Smoothing"), range, weight, reset, pinned, unpin,
    h("span", { class: "muted hint" }, "Hover to read, drag to zoom, click to pin a step"));
}

// Which curves a run has: the ones everybody looks at, in their order, and every other metric on request.

/** The first of these metrics that the run logged, or null. */
function firstOf(series, ...names) {
  return names.map((name) => series[name]).find((values) => values && values.some((value) => value !== null)) ?? null;
}

function lines(series, choices) {
  return choices.map(([label, color, ...names]) => ({ label, color, values: firstOf(series, ...names) }))
    .filter(({ values }) => values !== null);
}

/** `val-core/<source>/reward/greedy` -> "<source> greedy"; what is not a shown validation reward gives null. */
function validationLabel(name) {
  const parts = name.split("/");
  const what = parts[parts.length - 1];
  if (parts[0] !== "val-core" || parts.length < 4 || parts[parts.length - 2] !== "reward") return null;
  if (what !== "greedy" && !what.startsWith("mean@")) return null;
  return { source: parts.slice(1, -2).join("/"), what };
}

function isSupervised(series) {
  return firstOf(series, "reward", "critic/rewards/mean") === null && firstOf(series, "actor/loss", "val/loss") !== null;
}

function lossChart(series) {
  const found = lines(series, [["training", 1, "actor/loss"]]);
  if (series["val/loss"]) found.push({ label: "validation", color: 2, kind: "marks", values: series["val/loss"] });
  const unit = series["reward_model/accuracy"] || series["val/accuracy"] ? "mean per example" : "nats per response token";
  return { title: "Loss", unit, series: found, zero: true, wide: true, height: 260, format: formatScore };
}

/** Charts of a reward model's training. */
function rankingCharts(series) {
  const names = [["accuracy", "Accuracy", "share of pairs ranked right"], ["margin", "Margin", "score of the better minus the worse response"]];
  return names.filter(([name]) => series[`reward_model/${name}`] || series[`val/${name}`]).map(([name, title, unit]) => {
    const found = lines(series, [["training", 1, `reward_model/${name}`]]);
    if (series[`val/${name}`]) found.push({ label: "validation", color: 2, kind: "marks", values: series[`val/${name}`] });
    return { title, unit, series: found, zero: true, format: formatScore };
  });
}

function rewardChart(series) {
  const found = lines(series, [["training", 1, "reward", "critic/rewards/mean"]]);
  const validations = Object.keys(series).map((name) => [name, validationLabel(name)]).filter(([, label]) => label);
  const sources = new Set(validations.map(([, { source }]) => source));
  validations.slice(0, 6).forEach(([name, { source, what }], i) => found.push({
    label: (sources.size > 1 ? `${source} ` : "validation ") + what, color: 2 + (i % 3), kind: "marks", values: series[name],
  }));
  return { title: "Reward", unit: "mean per response", series: found, zero: true, wide: true, height: 260, format: formatScore };
}

/** One chart per reward function where there are several: their scales differ. */
function rewardFunctionCharts(series) {
  const names = Object.keys(series).filter((name) => /^rewards\/.+\/mean$/.test(name)).map((name) => name.slice(8, -5));
  if (names.length < 2) return [];
  return names.slice(0, MOST_REWARD_FUNCTIONS).map((name, i) => ({
    title: name, unit: "reward, unweighted", zero: true, format: formatScore,
    series: [{ label: "mean", color: 1 + (i % 9), values: series[`rewards/${name}/mean`] }],
  }));
}

/** One chart per reward model that the run trained; steps between two trainings have no values. */
function onlineRewardCharts(series) {
  return Object.keys(series).filter((name) => /^reward\/.+\/ranking_accuracy$/.test(name)).map((name) => {
    const of = name.slice(7, -17);
    return { title: `Reward model ${of}`, unit: "on outcomes that are new to it", zero: true, format: formatScore, series: lines(series, [
      ["ranking accuracy", 1, name], ["calibration error", 2, `reward/${of}/calibration_error`], ["drift", 5, `reward/${of}/drift`],
    ]) };
  });
}

const MOST_REWARD_FUNCTIONS = 9; // more are among all metrics

/** From where on the KL is at its clamp, in words; empty where it never is. */
function clampNote(values, steps, clamp) {
  const first = (values ?? []).findIndex((value) => clamp !== null && value !== null && value >= 0.9 * clamp);
  return first < 0 ? "" : `, at its clamp of ${formatNumber(clamp)} from step ${steps[first]}`;
}

// Stages in the order of a step, each with its color wherever it is drawn; color 8 is what is left over.
const STAGES = { gen: 1, reward: 2, adv: 9, old_log_prob: 6, ref: 3, update_actor: 4, sync: 7, testing: 5 };

/** stage -> color; a stage that has none of its own takes one that is free among these. */
function stageColors(names) {
  const free = [1, 2, 3, 4, 5, 6, 7, 9].filter((color) => !names.some((name) => STAGES[name] === color));
  return Object.fromEntries(names.map((name) => [name, STAGES[name] ?? free.shift() ?? 8]));
}

function stageChart(series, steps) {
  const stages = Object.keys(series).filter((name) => name.startsWith("timing_s/") && !["timing_s/step", "timing_s/testing"].includes(name));
  const total = (name) => series[name].reduce((sum, value) => sum + (value ?? 0), 0);
  const all = stages.reduce((sum, name) => sum + total(name), 0);
  const order = Object.keys(STAGES);
  const rank = (name) => (order.indexOf(name.slice(9)) + order.length + 1) % (order.length + 1);
  const large = stages.filter((name) => total(name) >= 0.01 * all).sort((a, b) => rank(a) - rank(b)).slice(0, 7);
  if (large.length === 0) return { title: "Time per stage", series: [] };
  const whole = series["timing_s/step"];
  const rest = steps.map((_, k) => {
    const parts = large.reduce((sum, name) => sum + (series[name][k] ?? 0), 0);
    const every = whole ? whole[k] : stages.reduce((sum, name) => sum + (series[name][k] ?? 0), 0);
    return every === null ? null : Math.max(0, every - parts);
  });
  const colors = stageColors(large.map((name) => name.slice(9)));
  const found = large.map((name) => ({ label: name.slice(9), color: colors[name.slice(9)], values: series[name] }));
  found.push({ label: "other", color: 8, values: rest });
  return { title: "Time per stage", unit: "seconds per step", series: found, stacked: true, format: formatSeconds, wide: true, height: 260 };
}

/** The charts everybody looks at; one without series was not recorded, and `missing` says why. */
function mainCharts(series, steps, klClamp) {
  const length = lines(series, [["mean", 1, "response_length/mean"]]);
  if (length.length > 0 && series["response_length/min"] && series["response_length/max"]) {
    const [low, high] = [series["response_length/min"], series["response_length/max"]];
    length.unshift({ label: "shortest – longest", color: 1, kind: "band", low, high, values: high });
  }
  const shares = { format: formatShare, zero: true, axis: (value, step) => tickLabel(100 * value, 100 * step) + "%" };
  return [ // a wide one and then a narrow one fill a row
    isSupervised(series) ? lossChart(series) : rewardChart(series),
    ...rankingCharts(series),
    { title: "Response length", unit: "tokens", series: length, zero: true, format: formatTokens },
    stageChart(series, steps),
    { title: "KL", unit: "to the reference" + clampNote(firstOf(series, "kl", "actor/kl_loss"), steps, klClamp), series: lines(series, [["KL", 2, "kl", "actor/kl_loss"]]), zero: true,
      missing: "no reference model was kept, algorithm.kl.coef=0" },
    ...rewardFunctionCharts(series),
    ...onlineRewardCharts(series),
    { title: "Entropy", unit: "nats per token", series: lines(series, [["entropy", 3, "actor/entropy", "entropy"]]), zero: true },
    { title: "Clip ratio", unit: "share of tokens", ...shares, series: lines(series, [
      ["all", 1, "actor/pg_clipfrac", "clip_ratio/region_mean"], ["low", 4, "clip_ratio/low_mean"], ["high", 2, "clip_ratio/high_mean"],
    ]), missing: "with one update per batch the policy is the one that sampled: nothing can be clipped" },
    { title: "Truncated responses and zero-std groups", unit: "shares", ...shares, series: lines(series, [
      ["truncated responses", 2, "response_length/clip_ratio"], ["zero-std groups", 5, "frac_reward_zero_std"],
    ]) },
    { title: "Gradient norm", unit: "before clipping", series: lines(series, [["grad norm", 4, "actor/grad_norm"]]), zero: true },
    { title: "Learning rate", exact: true, series: lines(series, [["lr", 5, "actor/lr"]]), zero: true },
    { title: "Rollout – trainer", unit: "gap of token probabilities", series: lines(series, [
      ["mean", 1, "training/rollout_probs_diff_mean"], ["largest", 2, "training/rollout_probs_diff_max"],
    ]), zero: true },
    { title: "Throughput", unit: "tokens per second", series: lines(series, [["tokens/s", 6, "perf/throughput"]]), zero: true },
    { title: "Memory", unit: "peak on the device", format: formatGib, series: lines(series, [
      ["allocated", 7, "perf/max_memory_allocated_gb"], ["reserved", 4, "perf/max_memory_reserved_gb"],
    ]), zero: true, missing: "this backend keeps no count" },
  ];
}

/** The section with every metric: charts are made when it is opened, and only for names that match the search. */
function allMetrics(view, series) {
  const names = Object.keys(series);
  const grid = h("div", { class: "charts" });
  const count = h("span", { class: "muted" });
  let made = [];
  const show = () => {
    const wanted = input.value.trim().toLowerCase();
    const found = names.filter((name) => name.toLowerCase().includes(wanted));
    count.textContent = `${found.length} of ${plural(names.length, "metric")}`;
    made.forEach((chart) => chart.remove());
    made = found.map((name) => new Chart(view, { title: name, height: 150, series: [{ label: "value", color: 1, values: series[name] }] }));
    grid.replaceChildren(...made.map((chart) => chart.element));
  };
  const input = h("input", { type: "search", placeholder: "e.g. rollout_corr", "aria-label": "search metrics by name", oninput: debounce(120, show) });
  const body = h("div", {}, h("div", { class: "bar" }, input, count), grid);
  return h("details", { class: "all", ontoggle: (event) => { if (event.target.open && made.length === 0) show(); } },
    h("summary", {}, `All ${plural(names.length, "metric")}`), body);
}

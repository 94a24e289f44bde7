// Series drawn into a chart: lines, bands, marked points, stacks.

function drawSeries(chart, body, series, smoothing) {
  const { steps, from, to } = chart.view;
  const color = `c${series.color}`;
  const runs = (values, bridge) => runsOf(steps, values, from, to, chart.x, chart.y, bridge);
  if (series.kind === "band") {
    const lows = runs(series.low, true)[0] ?? [];
    const highs = runs(series.high, true)[0] ?? [];
    if (lows.length > 0) body.append(s("path", { class: `area ${color}`, d: pathOf([...highs, ...lows.reverse()]) + "Z" }));
    return;
  }
  if (series.kind === "marks") {
    const points = runs(series.values, true)[0] ?? [];
    if (points.length > 1) body.append(s("path", { class: `line dashed ${color}`, d: pathOf(points) }));
    points.forEach(([x, y]) => body.append(s("path", { class: `mark ${color}`, d: diamond(x, y, 4.5) })));
    return;
  }
  const known = series.values.filter((value) => value !== null).length;
  const sparse = known < series.values.length / 2; // written at some steps only: join the points and show them
  const drawn = chart.smoothed(series, sparse ? 0 : smoothing);
  const layers = drawn === series.values ? [[drawn, ""]] : [[series.values, "faint"], [drawn, ""]];
  for (const [values, extra] of layers) {
    for (const run of runs(values, sparse)) {
      if (run.length > 1) body.append(s("path", { class: `line ${extra} ${color}`, d: pathOf(run) }));
      if (run.length === 1 || (sparse && run.length < 60)) {
        run.forEach(([cx, cy]) => body.append(s("circle", { class: `dot ${color}`, cx, cy, r: 3 })));
      }
    }
  }
}

function drawStack(chart, body, series) {
  const { steps, from, to } = chart.view;
  const groups = [];
  const every = Math.max(1, Math.ceil((to - from + 1) / (chart.box.right - chart.box.left)));
  for (let k = from; k <= to; k += every) {
    const members = [];
    for (let j = k; j < Math.min(k + every, to + 1); j++) if (series.some(({ values }) => values[j] !== null)) members.push(j);
    if (members.length === 0) continue;
    const mean = (values) => members.reduce((sum, j) => sum + (values[j] ?? 0), 0) / members.length;
    groups.push({ step: steps[members[0]], heights: series.map(({ values }) => mean(values)) });
  }
  const floor = groups.map(() => 0);
  series.forEach((each, n) => {
    const upper = groups.map(({ heights }, g) => floor[g] + heights[n]);
    const x = groups.map(({ step }) => chart.x(step));
    if (chart.bars || groups.length === 1) {
      const wide = Math.min(40, Math.max(2, chart.box.slot * 0.8));
      const d = groups.map((_, g) => pathOf([[x[g] - wide / 2, chart.y(upper[g])], [x[g] + wide / 2, chart.y(upper[g])],
        [x[g] + wide / 2, chart.y(floor[g])], [x[g] - wide / 2, chart.y(floor[g])]]) + "Z").join("");
      body.append(s("path", { class: `stack c${each.color}`, d }));
    } else {
      const over = groups.map((_, g) => [x[g], chart.y(upper[g])]);
      const under = groups.map((_, g) => [x[g], chart.y(floor[g])]).reverse();
      body.append(s("path", { class: `stack c${each.color}`, d: pathOf([...over, ...under]) + "Z" }));
    }
    upper.forEach((value, g) => { floor[g] = value; });
  });
}

function diamond(x, y, r) {
  return `M${x} ${y - r}L${x + r} ${y}L${x} ${y + r}L${x - r} ${y}Z`;
}

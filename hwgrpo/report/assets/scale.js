// Axes, smoothing and the thinning of long curves: numbers in, numbers out.

/** Round ticks (1, 2 or 5 times a power of ten) that cover [low, high]; about `count` of them. */
function ticks(low, high, count, whole = false) {
  if (!(high > low)) {
    const pad = low === 0 ? 1 : Math.abs(low) * 0.1;
    [low, high] = whole ? [low - 1, high + 1] : [low - pad, high + pad];
  }
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const factor = [1, 2, 5, 10].find((each) => each * power >= raw * 0.999);
  const step = whole ? Math.max(1, Math.round(factor * power)) : factor * power;
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  const found = [];
  for (let i = first; i <= last; i++) found.push(Number((i * step).toPrecision(12)));
  return { step, values: found };
}

/** Tick labels with as many decimals as their distance needs. */
function tickLabel(value, step) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e6 || step < 1e-4) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

/** Exponential moving average with the start's bias taken out, as TensorBoard's; null stays null. */
function smooth(values, weight) {
  let mean = 0;
  let seen = 0;
  return values.map((value) => {
    if (value === null) return null;
    seen += 1;
    mean = weight * mean + (1 - weight) * value;
    return mean / (1 - weight ** seen);
  });
}

/** Index of the sorted `steps` nearest to `step`. */
function nearestIndex(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
}

/**
 * Runs of neighbouring points as [x, y] in pixels. Where points are denser than pixels, a column keeps its first,
 * lowest, highest and last point, so that no peak is lost. A null ends a run unless `bridge` is set.
 */
function runsOf(steps, values, from, to, x, y, bridge) {
  const runs = [];
  let run = [];
  let column = null;
  const flush = () => {
    if (column !== null) {
      const kept = [...new Set([column.first, column.low, column.high, column.last])].sort((a, b) => a[2] - b[2]);
      run.push(...kept);
      column = null;
    }
  };
  for (let i = from; i <= to; i++) {
    if (values[i] === null) {
      if (bridge) continue;
      flush();
      if (run.length > 0) runs.push(run);
      run = [];
      continue;
    }
    const point = [x(steps[i]), y(values[i]), i];
    const pixel = Math.round(point[0]);
    if (column !== null && column.pixel !== pixel) flush();
    if (column === null) column = { pixel, first: point, low: point, high: point, last: point };
    else {
      if (point[1] > column.low[1]) column.low = point;
      if (point[1] < column.high[1]) column.high = point;
      column.last = point;
    }
  }
  flush();
  if (run.length > 0) runs.push(run);
  return runs;
}

function pathOf(points) {
  return points.map(([x, y], i) => `${i === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// One chart: lines with optional bands and marked points, or stages stacked.

const onScreen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.chart.setVisible(entry.isIntersecting);
}, { rootMargin: "200px" });
const onResize = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.chart.invalidate()));
const announcer = h("div", { class: "hidden", "aria-live": "polite" });

class Chart {
  /**
   * spec: title, unit, format, zero (the axis starts at 0), stacked, wide, height,
   * series: [{label, values, color 1..8, kind "line" | "marks" | "band", low, high}]
   */
  constructor(view, spec) {
    this.view = view;
    this.spec = spec;
    this.format = spec.format ?? formatNumber;
    this.off = new Set();
    this.visible = false;
    this.stale = true;
    this.values = spec.series.map((each) => each.values);
    this.at = h("span", { class: "at" });
    this.readouts = spec.series.map(() => h("b", { class: "value" }));
    this.plot = h("div", {
      class: "plot", tabindex: 0, role: "img", "aria-label": this.describe(),
      style: { "min-height": `${spec.height ?? 200}px` },
      onpointermove: (event) => this.pointerMove(event), onpointerdown: (event) => this.pointerDown(event),
      onpointerup: (event) => this.pointerUp(event), onpointerleave: () => this.pointerLeave(),
      onpointercancel: () => this.pointerLeave(), ondblclick: () => view.reset(),
      onkeydown: (event) => this.keyDown(event), onblur: () => view.point(view.pinned),
    });
    this.element = h("figure", { class: spec.wide ? "card chart wide" : "card chart" },
      h("figcaption", {}, h("h3", {}, spec.title), spec.unit ? h("span", { class: "muted" }, spec.unit) : null, this.at),
      h("div", { class: "legend" }, spec.series.map((each, i) => this.legendItem(each, i))),
      this.plot);
    this.plot.chart = this;
    onScreen.observe(this.plot);
    onResize.observe(this.plot);
    view.charts.add(this);
    this.showReadouts();
  }

  remove() {
    this.view.charts.delete(this);
    onScreen.unobserve(this.plot);
    onResize.unobserve(this.plot);
    this.element.remove();
  }

  describe() {
    const texts = this.spec.series.filter((each) => each.kind !== "band").map((each) => {
      const known = each.values.filter((value) => value !== null);
      if (known.length === 0) return `${each.label}: no values`;
      const low = known.reduce((a, b) => Math.min(a, b));
      const high = known.reduce((a, b) => Math.max(a, b));
      return `${each.label} from ${this.format(known[0])} to ${this.format(known[known.length - 1])}, `
        + `lowest ${this.format(low)}, highest ${this.format(high)}`;
    });
    return `Chart of ${this.spec.title} over steps. ${texts.join("; ")}. Arrow keys move between steps.`;
  }

  legendItem(series, index) {
    const swatch = h("i", { class: `swatch ${this.spec.stacked ? "block" : series.kind ?? "line"} c${series.color}` });
    const inside = [swatch, h("span", {}, series.label), this.readouts[index]];
    if (this.spec.series.length === 1) return h("span", { class: "item" }, inside);
    const button = h("button", {
      class: "item", type: "button", "aria-pressed": "true", title: `show or hide ${series.label}`,
      onclick: () => {
        if (!this.off.delete(index)) this.off.add(index);
        button.setAttribute("aria-pressed", String(!this.off.has(index)));
        this.invalidate();
      },
    }, inside);
    return button;
  }

  setVisible(visible) {
    this.visible = visible;
    if (visible && this.stale) this.draw();
  }

  invalidate() {
    this.stale = true;
    if (this.visible) this.draw();
  }

  shown() {
    return this.spec.series.map((series, i) => ({ ...series, i })).filter(({ i }) => !this.off.has(i));
  }

  /** [lowest, highest] of what is drawn in the range of steps. */
  extent(series) {
    let low = this.spec.zero || this.spec.stacked ? 0 : Infinity;
    let high = this.spec.zero || this.spec.stacked ? 0 : -Infinity;
    const take = (value) => {
      if (value === null) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    };
    for (let k = this.view.from; k <= this.view.to; k++) {
      if (this.spec.stacked) take(series.reduce((sum, { values }) => sum + (values[k] ?? 0), 0));
      else series.forEach((each) => (each.kind === "band" ? [each.low, each.high] : [each.values]).forEach((v) => take(v[k])));
    }
    return low <= high ? [low, high] : [0, 1];
  }

  draw() {
    const width = this.plot.clientWidth;
    const height = this.plot.clientHeight;
    if (width < 60) return;
    this.stale = false;
    const { steps, from, to } = this.view;
    const smoothing = this.spec.exact ? 0 : this.view.smoothing; // a schedule has no noise
    const series = this.shown();
    const [low, high] = this.extent(series);
    const vertical = ticks(low, high, height / 45);
    const label = this.spec.axis ?? tickLabel;
    const labels = vertical.values.map((value) => label(value, vertical.step));
    const left = 12 + 6.6 * Math.max(...labels.map((text) => text.length));
    const [bottom, top, right] = [height - 22, 8, width - 12];
    const [yLow, yHigh] = [vertical.values[0], vertical.values[vertical.values.length - 1]];
    this.y = (value) => bottom - ((value - yLow) / (yHigh - yLow)) * (bottom - top);
    // Bars need half their width at both ends.
    const slot = (right - left) / Math.max(1, to - from + 1);
    this.bars = this.spec.stacked && slot >= 5;
    const inset = this.bars ? slot / 2 : 0;
    const span = steps[to] - steps[from];
    this.x = (step) => (span > 0
      ? left + inset + ((step - steps[from]) / span) * (right - left - 2 * inset) : (left + right) / 2);
    this.inverse = (pixel) => steps[from] + ((pixel - left - inset) / (right - left - 2 * inset)) * span;
    this.box = { left, right, top, bottom, slot };

    const grid = s("g", { class: "grid" });
    vertical.values.forEach((value, i) => {
      const y = Math.round(this.y(value)) + 0.5;
      grid.append(s("line", { x1: left, x2: right, y1: y, y2: y, class: value === 0 ? "zero" : null }),
        s("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, labels[i]));
    });
    const horizontal = ticks(steps[from], steps[to], (right - left) / 70, true);
    horizontal.values.filter((step) => step >= steps[from] && step <= steps[to]).forEach((step) => {
      const x = this.x(step);
      const text = tickLabel(step, horizontal.step);
      const fits = x + 3.3 * text.length < width;
      grid.append(s("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "tick" }),
        s("text", { x: fits ? x : width, y: height - 6, "text-anchor": fits ? "middle" : "end" }, text));
    });
    for (const { step, mood } of this.view.resumes.filter((each) => each.step >= steps[from] && each.step <= steps[to])) {
      const x = this.x(step);
      grid.append(s("line", { x1: x, x2: x, y1: top, y2: bottom, class: mood === "bad" ? "resume bad" : "resume muted" }));
    }
    const body = s("g", {});
    if (this.spec.stacked) drawStack(this, body, series.map((each) => ({ ...each, values: this.smoothed(each, smoothing) })));
    else series.forEach((each) => drawSeries(this, body, each, smoothing));
    this.marker = s("g", { class: "cursor" });
    this.selection = s("rect", { class: "selection", y: top, height: bottom - top, width: 0 });
    this.plot.replaceChildren(s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, grid, body, this.selection, this.marker));
    this.showCursor();
  }

  /** The values that are drawn; kept for the read-out. */
  smoothed(series, weight) {
    this.values[series.i] = weight > 0 ? smooth(series.values, weight) : series.values;
    return this.values[series.i];
  }

  /** The read-out of each series: at the cursor, the smoothed value before the raw one; else the last value. */
  showReadouts() {
    const { cursor, steps } = this.view;
    this.at.textContent = cursor === null ? "" : `step ${steps[cursor].toLocaleString("en-US")}`;
    this.spec.series.forEach((series, i) => {
      let text;
      if (series.kind === "band") {
        const [low, high] = [series.low, series.high].map((values) => (cursor === null ? lastValue(values) : values[cursor]));
        text = low === null ? NONE : `${this.format(low)} – ${this.format(high)}`;
      } else {
        const raw = cursor === null ? lastValue(series.values) : series.values[cursor];
        const drawn = cursor === null ? raw : this.values[i][cursor];
        text = this.format(drawn) + (drawn === raw ? "" : ` (${this.format(raw)})`);
      }
      this.readouts[i].textContent = text;
    });
  }

  showCursor() {
    this.showReadouts();
    if (!this.marker) return;
    const { cursor, steps, from, to, pinned } = this.view;
    this.marker.replaceChildren();
    if (cursor === null || cursor < from || cursor > to) return;
    const x = this.x(steps[cursor]);
    const { top, bottom } = this.box;
    this.marker.append(s("line", { x1: x, x2: x, y1: top, y2: bottom, class: cursor === pinned ? "pinned" : null }));
    if (this.spec.stacked) return;
    this.shown().forEach(({ i, color, kind }) => {
      const value = kind === "band" ? null : this.values[i][cursor];
      if (value !== null) this.marker.append(s("circle", { cx: x, cy: this.y(value), r: 4, class: `point c${color}` }));
    });
  }

  indexAt(event) {
    const { steps, from, to } = this.view;
    const pixel = event.clientX - this.plot.getBoundingClientRect().left;
    return Math.min(to, Math.max(from, nearestIndex(steps, this.inverse(pixel))));
  }

  pointerMove(event) {
    if (!this.box) return;
    const index = this.indexAt(event);
    this.view.point(index);
    if (this.start !== undefined && event.pointerType === "mouse") {
      const [a, b] = [this.x(this.view.steps[this.start]), this.x(this.view.steps[index])];
      this.selection.setAttribute("x", Math.min(a, b));
      this.selection.setAttribute("width", Math.abs(a - b));
    }
  }

  pointerDown(event) {
    if (!this.box || event.button !== 0) return;
    this.start = this.indexAt(event);
    this.plot.setPointerCapture(event.pointerId);
    this.view.point(this.start);
  }

  pointerUp(event) {
    if (this.start === undefined) return;
    const [start, end] = [this.start, this.indexAt(event)];
    this.start = undefined;
    this.selection.setAttribute("width", 0);
    if (start === end) this.view.pin(this.view.pinned === end ? null : end);
    else if (event.pointerType === "mouse") this.view.zoom(Math.min(start, end), Math.max(start, end));
  }

  pointerLeave() {
    if (this.start === undefined) this.view.point(this.view.pinned);
  }

  keyDown(event) {
    const { view } = this;
    const now = view.cursor ?? view.to;
    const stride = event.shiftKey ? 10 : 1;
    const moves = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: view.from, End: view.to };
    if (event.key in moves) {
      view.point(Math.min(view.to, Math.max(view.from, moves[event.key])));
      const texts = this.spec.series.map((series, i) => `${series.label} ${this.readouts[i].textContent}`);
      announcer.textContent = `${this.spec.title}, ${this.at.textContent}: ${texts.join(", ")}`;
    } else if (event.key === "Enter") view.pin(view.pinned === now ? null : now);
    else if (event.key === "Escape") {
      view.pin(null);
      view.reset();
    } else return;
    event.preventDefault();
  }
}

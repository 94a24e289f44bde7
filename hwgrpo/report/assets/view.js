// What all charts share: the range of steps, the smoothing, and the step under the cursor.

class View {
  constructor(steps, resumes) {
    this.steps = steps;
    this.resumes = resumes;
    this.from = 0;
    this.to = Math.max(0, steps.length - 1);
    this.cursor = null;
    this.pinned = null;
    this.smoothing = 0;
    this.charts = new Set();
    this.onchange = () => {};
  }

  get zoomed() {
    return this.from > 0 || this.to < this.steps.length - 1;
  }

  zoom(from, to) {
    if (to - from < 1) return;
    [this.from, this.to] = [from, to];
    this.redraw();
  }

  reset() {
    this.zoom(0, this.steps.length - 1);
  }

  setSmoothing(weight) {
    this.smoothing = weight;
    this.redraw();
  }

  redraw() {
    this.charts.forEach((chart) => chart.invalidate());
    this.onchange();
  }

  point(index) {
    this.cursor = index;
    this.charts.forEach((chart) => chart.showCursor());
  }

  pin(index) {
    this.pinned = index;
    this.point(index);
    this.onchange();
  }
}

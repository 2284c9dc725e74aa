// @ts-check
/** State that the charts of a page share: the axis, the smoothing, the zoomed range, and the crosshair. */

/** @typedef {import("./chart.js").Chart} Chart */
/** @typedef {{run: string, name: string, color: number, rows: import("../core/contract.js").MetricsRow[]}} RunRows */

/** The charts of a page. */
export class Board {
  /**
   * @param {object} options
   * @param {"step"|"time"} options.axis
   * @param {number} options.smoothing
   * @param {[number, number]|null} options.zoom
   * @param {(zoom: [number, number]|null) => void} options.onZoom
   * @param {(step: number) => Node[]} options.linksTo returns the links for a step that was clicked
   */
  constructor({ axis, smoothing, zoom, onZoom, linksTo }) {
    this.axis = axis;
    this.smoothing = smoothing;
    this.zoom = zoom;
    this.onZoom = onZoom;
    this.linksTo = linksTo;
    /** @type {RunRows[]} */
    this.runs = [];
    /** @type {Chart[]} */
    this.charts = [];
    /** Position of the pointer since the last paint. @type {{x: number|null, at: Chart|null}|undefined} */
    this.pointer = undefined;
    this.watcher = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "300px" });
    this.sizes = new ResizeObserver((entries) => entries.forEach((entry) => this.chartOf(entry.target)?.later()));
  }

  /** @param {Chart} chart */
  add(chart) {
    this.charts.push(chart);
    this.watcher.observe(chart.element);
    this.sizes.observe(chart.plot);
  }

  /** Removes all charts. */
  clear() {
    this.watcher.disconnect();
    this.sizes.disconnect();
    this.charts = [];
  }

  /** @param {IntersectionObserverEntry[]} entries */
  seen(entries) {
    for (const entry of entries) {
      const chart = this.charts.find((one) => one.element === entry.target);
      if (!chart) continue;
      chart.isSeen = entry.isIntersecting;
      if (chart.isSeen && chart.isStale) chart.later();
    }
  }

  /** @param {Element} plot */
  chartOf(plot) {
    return this.charts.find((chart) => chart.plot === plot);
  }

  /** Redraws every chart; charts that are out of view are redrawn when they come into view. */
  redraw() {
    for (const chart of this.charts) chart.later();
  }

  /**
   * Shows one range of the axis in every chart; null shows the whole axis.
   * @param {[number, number]|null} zoom
   */
  zoomTo(zoom) {
    this.zoom = zoom;
    this.onZoom(zoom);
    this.redraw();
  }

  /**
   * Moves the crosshair of every chart.
   * @param {number|null} x null hides it
   * @param {Chart|null} [at] the chart under the pointer, which shows the values of each run
   */
  hover(x, at = null) {
    const isWaiting = this.pointer !== undefined;
    this.pointer = { x, at };
    if (isWaiting) return;
    requestAnimationFrame(() => {
      const pointer = this.pointer;
      this.pointer = undefined;
      for (const chart of this.charts) if (chart.isSeen) chart.cross(pointer?.x ?? null, chart === pointer?.at);
    });
  }

  /** @returns {[number, number]} the displayed range of the axis */
  domain() {
    if (this.zoom) return this.zoom;
    let [low, high] = [Infinity, -Infinity];
    for (const { rows } of this.runs) {
      for (const row of rows) {
        const x = this.axis === "time" ? row.time : row.step;
        if (x !== null) [low, high] = [Math.min(low, x), Math.max(high, x)];
      }
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }
}

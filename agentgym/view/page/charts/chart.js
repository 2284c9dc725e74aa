// @ts-check
/** One chart: the lines of a metric for several runs, its spread, its held-out points, and the values at the pointer. */

import { fill, h, s, styled } from "../core/dom.js";
import { duration, metric } from "../core/format.js";
import { spelled } from "../core/visible_text.js";
import { extent, linear, logarithmic, powers, ticks } from "./scale.js";
import { drawStack, stackDomain } from "./stack.js";
import { band, nearest, points, smoothed, thinned, thinnedBand } from "./series.js";

/** @typedef {import("./plan.js").Chosen} Chosen */
/** @typedef {import("./board.js").Board} Board */
/** @typedef {import("./series.js").Point} Point */
/** @typedef {{run: string, name: string, color: number, role: "line"|"faint"|"high"|"dots", series: Point[], metric: string}} Line */

const HEIGHT = 168;
/** With more runs than this, values are only shown at the pointer. */
const MOST_VALUES = 3;
/** With more runs than this, no spread is drawn, because the bands would hide each other. */
const MOST_BANDS = 4;
const ROOM = { left: 46, right: 10, top: 8, bottom: 20 };
let made = 0;

/** A chart on a board. */
export class Chart {
  /**
   * @param {Board} board
   * @param {Chosen} chosen
   * @param {string|null} [only] the only run to draw, on the scale of all runs; null draws all runs
   */
  constructor(board, chosen, only = null) {
    this.board = board;
    this.only = only;
    this.chosen = chosen;
    this.isSeen = false;
    this.isStale = true;
    this.isWaiting = false;
    this.isLog = false;
    this.isPinned = false;
    /** @type {Line[]} */
    this.lines = [];
    this.values = h("span", { class: "values" });
    this.plot = h("div", { class: "plot" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.log = h("button", { class: "quiet log", type: "button", "aria-pressed": "false", title: "Logarithmic axis", onclick: () => this.switchLog() }, "log");
    const unit = chosen.unit ? h("span", { class: "unit" }, chosen.unit) : null;
    const run = board.runs.find((one) => one.run === only);
    const name = h("h3", { title: chosen.name }, chosen.name, run && h("span", { class: `of-run run-${run.color}` }, h("span", { class: "swatch" }), run.name));
    this.element = h("article", { class: "chart", "data-metric": chosen.name }, h("header", null, name, unit, this.values, this.log), this.plot, this.tip);
    this.svg = s("svg", { role: "img", height: HEIGHT, "aria-label": chosen.name });
    this.cursor = s("line", { class: "cursor", y1: ROOM.top, y2: HEIGHT - ROOM.bottom, visibility: "hidden" });
    this.brush = s("rect", { class: "brush", y: ROOM.top, height: HEIGHT - ROOM.top - ROOM.bottom, visibility: "hidden" });
    const id = `clip-${made++}`;
    this.frame = s("rect", { x: ROOM.left - 4, y: 0, height: HEIGHT - ROOM.bottom + 4 });
    this.axisLayer = s("g");
    this.layer = s("g", { "clip-path": `url(#${id})` });
    this.svg.append(s("clipPath", { id }, this.frame), this.axisLayer, this.layer, this.brush, this.cursor);
    this.plot.append(this.svg);
    this.listen();
  }

  switchLog() {
    this.isLog = !this.isLog;
    this.log.setAttribute("aria-pressed", String(this.isLog));
    this.later();
  }

  /** Draws the chart before the next paint if it is in view, otherwise when it comes into view. */
  later() {
    this.isStale = true;
    if (!this.isSeen || this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.draw();
    });
  }

  draw() {
    this.isStale = false;
    const width = Math.max(220, this.plot.clientWidth);
    this.svg.setAttribute("width", String(width));
    this.x = linear(this.board.domain(), [ROOM.left, width - ROOM.right]);
    this.lines = this.board.runs.flatMap((run) => this.linesOf(run));
    this.y = this.scaleY();
    if (this.only) this.lines = this.lines.filter((line) => line.run === this.only);
    this.frame.setAttribute("width", String(width - ROOM.left - ROOM.right + 8));
    fill(this.axisLayer, this.axes(width));
    fill(this.layer, this.chosen.kind === "stack" ? this.stack() : [this.bands(), this.lines.map((line) => this.path(line))]);
    this.readOut(null);
  }

  /** @param {import("./board.js").RunRows} run */
  linesOf(run) {
    const { axis, smoothing } = this.board;
    const make = (/** @type {string} */ name, /** @type {Line["role"]} */ role, /** @type {number} */ weight) => ({
      run: run.run, name: run.name, color: run.color, role, metric: name, series: smoothed(points(run.rows, name, axis), weight),
    });
    const [first, second] = this.chosen.metrics;
    const isLine = this.chosen.kind !== "stack";
    if (first.startsWith("eval/")) return [make(first, "line", 0), make(first, "dots", 0)];
    /** @type {Line[]} */
    const lines = isLine ? [make(first, "line", smoothing)] : this.chosen.metrics.map((name) => make(name, "line", smoothing));
    if (isLine && smoothing > 0) lines.unshift(make(first, "faint", 0));
    if (this.chosen.kind === "quantiles") lines.push(make(second, "high", smoothing));
    if (this.chosen.dots) lines.push(make(this.chosen.dots, "dots", 0));
    return lines;
  }

  scaleY() {
    const [low, high] = /** @type {[number, number]} */ (this.x?.domain);
    const within = (/** @type {{x: number}} */ point) => point.x >= low && point.x <= high;
    /** @type {[number, number]} */
    const range = [HEIGHT - ROOM.bottom, ROOM.top];
    if (this.chosen.kind === "stack") return linear(stackDomain(this.lines, within), range);
    const values = this.lines.flatMap((line) => line.series.filter(within).map((point) => point.y));
    const positive = values.filter((value) => value > 0);
    if (this.isLog && positive.length) {
      const [from, to] = extent(positive);
      return logarithmic([Math.max(from, Math.min(...positive)) / 1.2, to * 1.2], range);
    }
    const edges = this.bandsOf().flatMap(({ series }) => series.filter(within).flatMap((point) => [point.low, point.high]));
    return linear(extent([...values, ...edges]), range);
  }

  bandsOf() {
    const wanted = this.chosen.band;
    if (!wanted || (!this.only && this.board.runs.length > MOST_BANDS)) return [];
    return this.board.runs.filter((run) => !this.only || run.run === this.only).map((run) => ({ color: run.color, series: band(run.rows, wanted.low, wanted.high, this.board.axis, wanted.around) }));
  }

  /** @param {number} width */
  axes(width) {
    const y = /** @type {import("./scale.js").Scale} */ (this.y);
    const x = /** @type {import("./scale.js").Scale} */ (this.x);
    const rows = (this.isLog ? powers(y.domain) : ticks(y.domain, 4)).map((value) => [
      s("line", { class: "grid", x1: ROOM.left, x2: width - ROOM.right, y1: y(value), y2: y(value) }),
      s("text", { class: "tick", x: ROOM.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, metric(value, 3)),
    ]);
    const name = this.board.axis === "time" ? duration : metric;
    const columns = ticks(x.domain, Math.max(2, Math.floor(width / 90)))
      .filter((value) => this.board.axis === "time" || Number.isInteger(value))
      .map((value) => s("text", { class: "tick", x: x(value), y: HEIGHT - 5, "text-anchor": "middle" }, name(value)));
    return [rows, columns];
  }

  stack() {
    return drawStack(this.lines, /** @type {any} */ (this.x), /** @type {any} */ (this.y), this.chosen.metrics);
  }

  bands() {
    const [x, y] = [/** @type {any} */ (this.x), /** @type {any} */ (this.y)];
    return this.bandsOf().filter(({ series }) => series.length > 1).map(({ color, series: all }) => {
      const series = thinnedBand(all, x);
      const upper = series.map((point) => `${x(point.x).toFixed(1)},${y(point.high).toFixed(1)}`);
      const lower = series.map((point) => `${x(point.x).toFixed(1)},${y(point.low).toFixed(1)}`).reverse();
      return s("polygon", { class: `band run-${color}`, points: [...upper, ...lower].join(" ") });
    });
  }

  /** @param {Line} line */
  path(line) {
    const [x, y] = [/** @type {any} */ (this.x), /** @type {any} */ (this.y)];
    if (line.role === "dots") return this.dots(line);
    const series = thinned(line.series, x);
    const single = series.length === 1 && s("circle", { class: `dot run-${line.color}`, cx: x(series[0].x), cy: y(series[0].y), r: 2.5 });
    const way = series.map((point, place) => `${place ? "L" : "M"}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("");
    return [s("path", { class: `${line.role} run-${line.color}`, d: way }), single];
  }

  /** @param {Line} line */
  dots(line) {
    const [x, y] = [/** @type {any} */ (this.x), /** @type {any} */ (this.y)];
    return line.series.map((point) => s("circle", { class: `held run-${line.color}`, cx: x(point.x), cy: y(point.y), r: 3.5 }));
  }

  /**
   * Shows the crosshair at `at`, and the values at this position.
   * @param {number|null} at
   * @param {boolean} isHere whether the pointer is over this chart
   */
  cross(at, isHere) {
    const x = this.x;
    if (!x) return;
    const found = at === null ? null : this.valuesAt(at);
    const place = found && found[0] ? x(found[0].point.x) : null;
    if (isHere && found?.[0] && !this.isPinned) this.picked = found[0].point.step;
    this.cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, String(place));
    this.readOut(found);
    this.showTip(isHere ? found : null, place, at === null ? null : x(at));
  }

  /** @param {number} at */
  valuesAt(at) {
    const isHeldOut = this.chosen.metrics[0].startsWith("eval/");
    return this.lines.filter((line) => line.role !== "faint" && !(isHeldOut && line.role === "dots")).flatMap((line) => {
      const point = nearest(line.series, at);
      return point ? [{ line, point }] : [];
    });
  }

  /** @param {{line: Line, point: Point}[]|null} found null for the last values */
  readOut(found) {
    const main = (found ?? this.lines.filter((line) => line.role !== "faint").flatMap((line) => (line.series.length ? [{ line, point: line.series[line.series.length - 1] }] : [])))
      .filter(({ line }) => line.role === "line" && this.chosen.kind !== "stack");
    const few = !this.only && this.board.runs.length > MOST_VALUES ? [] : main;
    fill(this.values, few.map(({ line, point }) => h("span", { class: `value run-${line.color}`, title: this.board.smoothing > 0 ? "as drawn: smoothed" : "as measured" }, metric(point.y, 3))));
    const words = main.map(({ line, point }) => `${line.name} ${metric(point.y)} at step ${point.step}`);
    if (!found) this.svg.setAttribute("aria-label", spelled(`${this.chosen.name}: ${words.join("; ") || "no values"}`));
  }

  /**
   * @param {{line: Line, point: Point}[]|null} found
   * @param {number|null} place
   * @param {number|null} pointer the position that the values must not cover
   */
  showTip(found, place, pointer) {
    if (this.isPinned) return;
    this.tip.hidden = !found?.length || place === null || pointer === null;
    if (!found?.length || place === null || pointer === null) return;
    const head = this.board.axis === "time" ? `step ${found[0].point.step}, ${duration(found[0].point.x)}` : `step ${found[0].point.step}`;
    const rows = found.map(({ line, point }) => h("tr", null,
      h("th", { scope: "row", class: this.chosen.kind === "stack" ? `part-${this.chosen.metrics.indexOf(line.metric)}` : `run-${line.color}` }, h("span", { class: line.role === "dots" ? "swatch ring" : "swatch" }), this.nameOf(line), point.step !== found[0].point.step && `, step ${point.step}`),
      h("td", null, metric(point.y)), this.raw(line, point)));
    fill(this.tip, h("div", null, head), h("table", null, h("tbody", null, rows)));
    const width = this.plot.clientWidth;
    styled(this.tip, place > width / 2 ? { right: `${width - Math.min(place, pointer) + 12}px`, left: "auto" } : { left: `${Math.max(place, pointer) + 12}px`, right: "auto" });
  }

  /**
   * The value before smoothing.
   * @param {Line} line
   * @param {Point} point
   */
  raw(line, point) {
    const own = this.lines.find((one) => one.role === "faint" && one.run === line.run);
    const value = line.role === "line" && own ? nearest(own.series, point.x) : undefined;
    return h("td", { class: "raw", title: "without smoothing" }, value && metric(value.y));
  }

  /** @param {Line} line */
  nameOf(line) {
    if (this.chosen.kind === "stack") return line.metric.replace("time/", "");
    if (line.role === "dots") return `${line.name} held out`;
    if (line.role === "high") return `${line.name} largest`;
    return this.chosen.kind === "quantiles" ? `${line.name} median` : line.name;
  }

  listen() {
    /** @type {number|null} */
    let from = null;
    const at = (/** @type {MouseEvent} */ event) => event.clientX - this.plot.getBoundingClientRect().left;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button === 0) [from] = [at(event), this.svg.setPointerCapture(event.pointerId)];
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (from !== null) this.mark(from, at(event));
      this.board.hover(this.x?.invert(at(event)) ?? null, this);
    });
    this.svg.addEventListener("pointerleave", () => this.board.hover(null));
    this.svg.addEventListener("pointerup", (event) => {
      if (from !== null) this.released(from, at(event));
      from = null;
      this.brush.setAttribute("visibility", "hidden");
    });
    this.svg.addEventListener("dblclick", () => this.board.zoomTo(null));
  }

  /**
   * @param {number} from
   * @param {number} to
   */
  mark(from, to) {
    this.brush.setAttribute("visibility", Math.abs(to - from) > 4 ? "visible" : "hidden");
    this.brush.setAttribute("x", String(Math.min(from, to)));
    this.brush.setAttribute("width", String(Math.abs(to - from)));
  }

  /**
   * @param {number} from
   * @param {number} to
   */
  released(from, to) {
    const x = this.x;
    if (!x) return;
    if (Math.abs(to - from) > 4) this.board.zoomTo([x.invert(Math.min(from, to)), x.invert(Math.max(from, to))]);
    else {
      if (!this.isPinned) this.cross(x.invert(to), true); // a click may come without a pointer move before it
      this.pin(!this.isPinned);
    }
  }

  /**
   * Pins the values of a step, with links to its rollouts, or unpins them.
   * @param {boolean} isPinned
   */
  pin(isPinned) {
    this.isPinned = isPinned;
    this.tip.classList.toggle("pinned", isPinned);
    if (!isPinned) this.tip.hidden = true;
    else if (this.picked !== undefined) this.tip.append(...this.board.linksTo(this.picked));
  }
}

// @ts-check
/** The first page: all runs, and the overlaid curves of the selected ones. */

import { keep, link } from "../core/address.js";
import { get } from "../core/api.js";
import { byId, fill, h, styled } from "../core/dom.js";
import { metric } from "../core/format.js";
import { follow, pause } from "../core/live.js";
import { metrics } from "../core/metrics.js";
import { shortNames } from "../core/run_names.js";
import { bind } from "../frame/keyboard.js";
import { empty, frame, showLive, title } from "../frame/shell.js";
import { Board } from "../charts/board.js";
import { Chart } from "../charts/chart.js";
import { plan } from "../charts/plan.js";
import { findingsOf } from "../parts/findings_list.js";
import { runList } from "../parts/run_list.js";

/** @typedef {import("../core/contract.js").RunLine} RunLine */

/** Number of runs that are drawn by default. */
const UNASKED = 4;
/** Number of colors for runs. */
const COLORS = 8;
/** Milliseconds between requests for the list of runs. */
const LIST_MS = 5000;
/** With more runs than this, the charts of one metric take several lines. */
const MOST_BESIDE = 4;

/** Sections that are initially collapsed. */
const CLOSED = new Set(["other", "drops", "throughput"]);

/**
 * @param {import("../app.js").Page} page
 */
export async function show({ main, query, signal, runs }) {
  frame(null, "");
  title("runs");
  if (!runs.length) return fill(main, h("h1", null, "Runs"), empty("There is no run in these folders yet.", "Start a training run with --output-dir in one of them, or open the viewer on another folder: agentgym view RUN."));
  const trained = runs.filter((run) => run.kind === "train");
  const chosen = query.runs === undefined ? trained.slice(0, UNASKED).map((run) => run.run) : query.runs.split(",").filter((id) => runs.some((run) => run.run === id));
  const page = new CurvesPage(main, signal, runs, chosen, query);
  page.frame();
  bind({ "/": { what: "find a metric", run: () => byId("search").focus() } });
  await page.load();
  page.watch();
}

/** The state of the page: which runs are drawn, and how. */
class CurvesPage {
  /**
   * @param {HTMLElement} main
   * @param {AbortSignal} signal
   * @param {RunLine[]} runs
   * @param {string[]} chosen
   * @param {Record<string, string>} query
   */
  constructor(main, signal, runs, chosen, query) {
    this.main = main;
    this.signal = signal;
    this.runs = runs;
    this.chosen = chosen;
    /** @type {Record<string, any>} */
    this.query = { ...query };
    /** @type {import("../core/contract.js").MetricGroup[]} */
    this.groups = [];
    /** Runs whose metrics are requested repeatedly. @type {Set<string>} */
    this.following = new Set();
    /** The color of each drawn run, which stays the same as long as the run is drawn. @type {Map<string, number>} */
    this.colors = new Map();
    this.color();
    const zoom = (query.zoom ?? "").split("..").map(Number);
    this.board = new Board({
      axis: query.axis === "time" ? "time" : "step",
      smoothing: Math.min(0.99, Math.max(0, Number(query.smooth ?? 0.6) || 0)),
      zoom: zoom.length === 2 && zoom.every(Number.isFinite) && zoom[1] > zoom[0] ? [zoom[0], zoom[1]] : null,
      onZoom: (stretch) => this.keep({ zoom: stretch && stretch.map((edge) => Number(edge.toPrecision(6))).join("..") }),
      linksTo: (step) => this.linksTo(step),
    });
    this.charts = h("div", { class: "sections" });
    this.findings = h("div");
    this.reset = h("button", { type: "button", class: "quiet", hidden: !this.board.zoom, onclick: () => this.board.zoomTo(null) }, "Show all steps");
    this.shape = "";
    signal.addEventListener("abort", () => this.board.clear());
  }

  /** @param {Record<string, any>} changed */
  keep(changed) {
    Object.assign(this.query, changed);
    this.reset.hidden = !this.board.zoom;
    keep(this.query);
  }

  frame() {
    this.list = h("div");
    this.drawList();
    fill(this.main, h("div", { class: "curves" },
      h("aside", { class: "side", "aria-label": "Runs" }, h("h1", null, "Runs"), this.list, this.findings),
      h("div", { class: "content" }, this.controls(), this.charts)));
  }

  /** Gives each selected run a different color, as long as there are enough colors. */
  color() {
    for (const run of this.colors.keys()) if (!this.chosen.includes(run)) this.colors.delete(run);
    for (const run of this.chosen) {
      if (this.colors.has(run)) continue;
      const taken = new Set(this.colors.values());
      const free = Array.from({ length: COLORS }, (_, place) => place).find((place) => !taken.has(place));
      this.colors.set(run, free ?? this.colors.size % COLORS);
    }
  }

  drawList() {
    const focused = document.activeElement?.id;
    if (this.list) fill(this.list, runList(this.runs, this.colors, (chosen) => this.choose(chosen)));
    if (focused?.startsWith("run-")) document.getElementById(focused)?.focus();
  }

  /** Checks repeatedly for new runs and finished steps. */
  async watch() {
    for (;;) {
      await pause(LIST_MS, this.signal);
      if (this.signal.aborted) return;
      if (document.hidden) continue;
      const found = await get(["runs"], {}, this.signal).catch(() => null);
      if (!found || JSON.stringify(found.runs) === JSON.stringify(this.runs)) continue;
      this.runs = found.runs;
      this.drawList();
    }
  }

  controls() {
    const value = h("output", null, this.board.smoothing.toFixed(2));
    const slider = h("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: this.board.smoothing, oninput: () => {
      this.board.smoothing = Number(slider.value);
      value.textContent = this.board.smoothing.toFixed(2);
      this.keep({ smooth: this.board.smoothing });
      this.board.redraw();
    } });
    const axis = h("select", { id: "axis", onchange: () => this.switchAxis(/** @type {"step"|"time"} */ (axis.value)) },
      h("option", { value: "step", selected: this.board.axis === "step" }, "step"), h("option", { value: "time", selected: this.board.axis === "time" }, "time"));
    const layout = h("select", { "aria-label": "Layout", onchange: () => {
      this.keep({ layout: layout.value });
      this.draw();
    } }, h("option", { value: "" }, "overlaid"), h("option", { value: "beside", selected: this.query.layout === "beside" }, "side by side"));
    const wanted = h("input", { type: "search", id: "search", placeholder: "Find a metric ( / )", "aria-label": "Find a metric", value: this.query.metrics ?? "", oninput: () => {
      this.keep({ metrics: wanted.value });
      this.filter();
    } });
    return h("div", { class: "bar" }, wanted, h("label", { for: "smoothing" }, "Smoothing"), slider, value, h("label", { for: "axis" }, "Axis"), axis, layout, this.reset,
      h("span", { class: "hint" }, "Drag to zoom, double-click to show all."));
  }

  /** @param {"step"|"time"} axis */
  switchAxis(axis) {
    this.board.axis = axis;
    this.keep({ axis: axis === "time" ? axis : null });
    this.board.zoomTo(null);
  }

  /** @param {string[]} chosen */
  async choose(chosen) {
    this.chosen = chosen;
    this.keep({ runs: chosen.join(",") || "none" });
    this.color();
    this.drawList();
    await this.load();
  }

  async load() {
    const lines = this.chosen.flatMap((id) => this.runs.find((run) => run.run === id) ?? []);
    frame(lines.length === 1 ? /** @type {any} */ (lines[0]) : null, "curves");
    const [rows, names] = await Promise.all([Promise.all(lines.map((run) => metrics(run.run, this.signal))), get(["metrics-names"], {}, this.signal)]);
    if (this.signal.aborted) return;
    this.groups = names.groups;
    const shown = shortNames(lines.map((run) => run.name));
    this.board.runs = lines.map((run, place) => ({ run: run.run, name: shown.get(run.name) ?? run.name, color: this.colors.get(run.run) ?? 0, rows: rows[place] }));
    title(lines.length === 1 ? lines[0].name : "runs");
    this.draw();
    for (const run of lines.filter((line) => line.live)) this.followed(run);
  }

  /** @param {RunLine} run */
  followed(run) {
    if (this.following.has(run.run)) return;
    this.following.add(run.run);
    follow(run.run, async (state) => {
      if (this.chosen.length === 1 && this.chosen[0] === run.run) showLive(state.live, state.steps_done, run.steps);
      const shown = this.board.runs.find((one) => one.run === run.run);
      if (!shown) return;
      shown.rows = await metrics(run.run, this.signal);
      this.draw();
    }, this.signal);
  }

  /** Draws the charts; if only points were added, the existing charts are redrawn in place. */
  draw() {
    const sections = plan(this.groups, this.board.runs.map((run) => run.rows));
    const shape = JSON.stringify([this.query.layout, this.board.runs.map((run) => run.run), sections.map((one) => [one.title, one.charts, one.still])]);
    if (shape === this.shape) this.board.redraw();
    else this.rebuild(sections);
    this.shape = shape;
    fill(this.findings, this.board.runs.length === 1 && findingsOf(this.board.runs[0].run, this.board.runs[0].rows));
  }

  /** @param {import("../charts/plan.js").Section[]} sections */
  rebuild(sections) {
    const closed = new Set([...this.charts.querySelectorAll("details:not([open])")].map((one) => one.getAttribute("data-title")));
    const known = new Set([...this.charts.querySelectorAll("details")].map((one) => one.getAttribute("data-title")));
    this.board.clear();
    const made = sections.map((one) => this.section(one, known.has(one.title) ? !closed.has(one.title) : !CLOSED.has(one.title)));
    fill(this.charts, made.length ? made : this.nothing());
    this.filter();
  }

  nothing() {
    if (!this.chosen.length) return empty("No run is chosen.", "Tick runs on the left to overlay their curves.");
    return empty("These runs have no metrics yet.", "A run writes its first line when its first step is done; this page then updates automatically.");
  }

  /**
   * @param {import("../charts/plan.js").Section} one
   * @param {boolean} isOpen
   */
  section(one, isOpen) {
    const isBeside = this.query.layout === "beside" && this.board.runs.length > 1;
    const grid = h("div", { class: isBeside ? "grid-of-charts beside" : "grid-of-charts" }, one.charts.flatMap((chosen) => (isBeside ? this.board.runs.map((run) => this.chart(chosen, run.run)) : [this.chart(chosen, null)])));
    if (isBeside && this.board.runs.length <= MOST_BESIDE) styled(grid, { "grid-template-columns": `repeat(${this.board.runs.length}, minmax(0, 1fr))` });
    return h("details", { open: isOpen, "data-title": one.title }, h("summary", null, h("h2", null, one.title), h("span", { class: "hint" }, one.help)), grid, still(one));
  }

  /**
   * @param {import("../charts/plan.js").Chosen} chosen
   * @param {string|null} only
   */
  chart(chosen, only) {
    const chart = new Chart(this.board, chosen, only);
    this.board.add(chart);
    return chart.element;
  }

  filter() {
    const wanted = (this.query.metrics ?? "").toLowerCase();
    for (const chart of this.board.charts) chart.element.hidden = !chart.chosen.name.toLowerCase().includes(wanted) && !chart.chosen.metrics.some((name) => name.includes(wanted));
    for (const section of this.charts.querySelectorAll("details")) {
      const left = section.querySelector(".chart:not([hidden])") !== null;
      section.hidden = wanted !== "" && !left;
      if (wanted && left) section.open = true;
    }
  }

  /** @param {number} step */
  linksTo(step) {
    return this.board.runs.map((run) => h("a", { class: "button", href: link([run.run, "rollouts"], { phase: "train", step_from: step, step_to: step }) },
      this.board.runs.length > 1 ? `Rollouts of ${run.name}` : "Rollouts of this step"));
  }
}

/**
 * Returns the metrics of a section that never change, with their values.
 * @param {import("../charts/plan.js").Section} section
 */
function still({ still: metrics }) {
  if (!metrics.length) return null;
  const [zero, others] = [metrics.filter((one) => one.value === 0), metrics.filter((one) => one.value !== 0)];
  return h("p", { class: "still" },
    zero.length > 0 && h("span", null, `Always 0: ${zero.map((one) => one.name).join(", ")}. `),
    others.length > 0 && h("span", null, `Always the same: ${others.map((one) => `${one.name} ${metric(one.value)}`).join(", ")}.`));
}

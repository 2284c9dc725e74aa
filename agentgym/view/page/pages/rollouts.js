// @ts-check
/** The table of all rollouts of a run, with filters, search and sorting. Only visible rows are drawn. */

import { go, keep, link } from "../core/address.js";
import { get } from "../core/api.js";
import { byId, fill, h, say } from "../core/dom.js";
import { many } from "../core/format.js";
import { bind } from "../frame/keyboard.js";
import { empty, title } from "../frame/shell.js";
import { remember } from "../frame/trail.js";
import { filterBar, FILTERS, histogram } from "../parts/filters.js";
import { head, tableRow } from "../parts/rollout_table.js";
import { VirtualRows } from "../parts/virtual_rows.js";

/** @typedef {import("../core/contract.js").RolloutLine} RolloutLine */

const HEIGHT = 29;
/** Milliseconds to wait until more rollouts are indexed. */
const INDEX_MS = 700;
/** Position in each table when it was left, by its address. @type {Map<string, {top: number, current: number}>} */
const left = new Map();

/** @param {import("../app.js").Page} page */
export async function show(page) {
  title("rollouts", page.run.name);
  const table = new RolloutsPage(page);
  table.frame();
  await table.rows.restart();
  table.comeBack();
  page.onChange((state, before) => table.changed(state, before));
}

/** The state of the page. */
class RolloutsPage {
  /** @param {import("../app.js").Page} page */
  constructor(page) {
    this.page = page;
    this.run = page.run;
    this.query = { ...page.query };
    this.count = h("span", { class: "count", role: "status" });
    this.more = h("button", { type: "button", class: "accent", hidden: true, onclick: () => this.refresh() });
    this.rewards = h("span", { class: "histogram", role: "group", "aria-label": "Rewards" });
    this.viewport = h("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": "Rollouts", "aria-multiselectable": "false" });
    this.problem = h("div");
    this.note = h("span", { class: "hint" });
    /** @type {VirtualRows<RolloutLine>} */
    this.rows = new VirtualRows(this.viewport, HEIGHT, {
      ask: (offset, limit) => this.ask(offset, limit),
      draw: (row, index) => tableRow(this.run.run, row, index, this.query.q ?? "", HEIGHT, () => this.opened(index)),
      counted: (total) => this.counted(total),
      failed: (error) => this.failed(error),
    });
    page.signal.addEventListener("abort", () => left.set(this.address, { top: this.viewport.scrollTop, current: this.rows.current }));
    this.address = location.hash;
  }

  /**
   * @param {number} offset
   * @param {number} limit
   * @returns {Promise<{total: number, rows: RolloutLine[]}>}
   */
  async ask(offset, limit) {
    const found = await get(["runs", this.run.run, "rollouts"], { ...this.query, offset: String(offset), limit }, this.page.signal);
    const left = this.query.q && found.indexed !== null ? this.run.rollouts - found.indexed : 0;
    fill(this.note, left > 0 ? `${many(left, "rollout")} cannot be searched yet: the index is being built.` : null);
    if (left > 0) this.lookAgain();
    return found;
  }

  /** Requests the table again when more of the run can be searched; one request at a time. */
  lookAgain() {
    clearTimeout(this.again);
    this.again = window.setTimeout(() => !this.page.signal.aborted && this.query.q && this.rows.restart(), INDEX_MS);
  }

  get by() {
    return { sort: this.query.sort ?? "number", order: this.query.order ?? "asc" };
  }

  frame() {
    fill(this.page.main, h("div", { class: "table-page" },
      h("h1", { class: "unseen" }, `Rollouts of ${this.run.name}`),
      this.bar = this.filters(),
      h("div", { class: "bar under" }, this.count, this.more, this.note, h("span", { class: "grow" }), h("span", { class: "hint" }, "rewards"), this.rewards),
      this.problem, this.viewport));
    this.viewport.prepend(this.headRow = head(this.by, (sort) => this.sortBy(sort)));
    this.viewport.addEventListener("dblclick", () => this.open());
    this.viewport.addEventListener("click", (event) => this.clicked(/** @type {HTMLElement} */ (event.target)));
    this.keys();
    this.drawRewards();
  }

  filters() {
    return filterBar(this.run, this.query, (name, value) => this.change(name ? { [name]: value } : Object.fromEntries(FILTERS.map((one) => [one, ""])), name === ""));
  }

  /**
   * @param {Record<string, string>} changes
   * @param {boolean} [redrawBar]
   */
  change(changes, redrawBar) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === "") delete this.query[name];
      else this.query[name] = value;
    }
    keep(this.query);
    this.address = location.hash;
    if (redrawBar && this.bar) {
      const fresh = this.filters();
      this.bar.replaceWith(fresh);
      this.bar = fresh;
    }
    this.viewport.scrollTop = 0;
    this.rows.current = 0;
    this.refresh();
    this.drawRewards();
  }

  refresh() {
    this.more.hidden = true;
    fill(this.problem);
    this.rows.restart();
  }

  /** @param {string} sort */
  sortBy(sort) {
    const order = this.by.sort === sort ? (this.by.order === "asc" ? "desc" : "asc") : "asc";
    this.change({ sort, order });
    const fresh = head(this.by, (other) => this.sortBy(other));
    this.headRow?.replaceWith(fresh);
    this.headRow = fresh;
    /** @type {HTMLElement|null} */ (fresh.querySelector("[aria-sort] button"))?.focus();
  }

  async drawRewards() {
    const { reward_from, reward_to, sort, order, ...others } = this.query;
    try {
      const found = await get(["runs", this.run.run, "reward-histogram"], { ...others, bins: 24 }, this.page.signal);
      histogram(this.rewards, found, (from, to) => this.change({ reward_from: String(Number(from.toPrecision(6))), reward_to: String(Number(to.toPrecision(6))) }, true));
    } catch {
      fill(this.rewards); // the table shows the error
    }
  }

  /** @param {number} total */
  counted(total) {
    const words = total === this.run.rollouts ? many(total, "rollout") : `${many(total, "rollout")} of ${this.run.rollouts.toLocaleString("en")}`;
    if (this.count.textContent !== words) fill(this.count, words);
    this.viewport.setAttribute("aria-rowcount", String(total + 1));
    if (total) fill(this.problem);
    else fill(this.problem, this.run.rollouts ? empty("No rollout matches these filters.", this.query.q ? "A search finds rollouts that contain all of its words: remove a word, or clear all." : "Remove a filter, or clear all.") : empty("This run has no rollouts yet.", "They appear here when the first group is done."));
  }

  /** @param {unknown} error */
  failed(error) {
    if (!this.page.signal.aborted) fill(this.problem, empty(error instanceof Error ? error.message : String(error), "Change the filter, or clear all."));
  }

  /**
   * Handles new rollouts. At the end, they are appended; if they come first, the visible rows stay visible; in any other
   * order, the reader can load them with a button.
   * @param {import("../core/contract.js").State} state
   * @param {import("../core/contract.js").State|null} before
   */
  changed(state, before) {
    const fresh = state.rollouts - (before?.rollouts ?? this.run.rollouts);
    this.run.rollouts = state.rollouts;
    if (fresh <= 0) return;
    const isPlain = FILTERS.every((name) => !this.query[name]);
    if (this.by.sort === "number" && isPlain) {
      const isFirst = this.by.order === "desc";
      if (isFirst && this.viewport.scrollTop > 0) this.rows.current += fresh;
      this.rows.restart(isFirst && this.viewport.scrollTop > 0 ? fresh : 0);
    } else {
      this.waiting = (this.more.hidden ? 0 : (this.waiting ?? 0)) + fresh;
      fill(this.more, `${many(this.waiting, "new rollout")}: reload`);
      this.more.hidden = false;
    }
  }

  /** @param {HTMLElement} target */
  clicked(target) {
    const row = target.closest("[aria-rowindex]");
    if (row && !target.closest("a")) this.rows.go(Number(row.getAttribute("aria-rowindex")) - 2);
    this.pointed();
  }

  pointed() {
    this.viewport.setAttribute("aria-activedescendant", `row-${this.rows.current}`);
  }

  /** @param {number} by */
  step(by) {
    this.rows.go(this.rows.current + by);
    this.pointed();
    const row = this.rows.row(this.rows.current);
    if (row) say(`rollout ${row.number}, ${row.rollout_id}, reward ${row.reward ?? "failed"}`);
  }

  /** @param {number} index */
  opened(index) {
    const row = this.rows.row(index);
    this.rows.current = index;
    if (row) remember({ run: this.run.run, query: this.query, index, number: row.number, total: this.rows.total });
  }

  open() {
    const row = this.rows.row(this.rows.current);
    if (!row) return;
    this.opened(this.rows.current);
    go(link([this.run.run, "rollout", row.number]));
  }

  comeBack() {
    const place = left.get(this.address);
    if (place) [this.viewport.scrollTop, this.rows.current] = [place.top, place.current];
    this.rows.draw();
    this.viewport.focus({ preventScroll: true });
    this.pointed();
  }

  group() {
    const row = this.rows.row(this.rows.current);
    if (row) go(link([this.run.run, "group"], { phase: row.phase, step: row.step, task: row.task }));
  }

  keys() {
    bind({
      "j ArrowDown": { what: "next row", run: () => this.step(1) },
      "k ArrowUp": { what: "previous row", run: () => this.step(-1) },
      PageDown: { what: "a page down", run: () => this.step(this.rows.inSight) },
      PageUp: { what: "a page up", run: () => this.step(-this.rows.inSight) },
      Home: { what: "first row", run: () => this.step(-Infinity) },
      End: { what: "last row", run: () => this.step(this.rows.total) },
      Enter: { what: "open the rollout", run: () => this.open() },
      g: { what: "open the row's group", run: () => this.group() },
      "/": { what: "search", run: () => byId("search").focus() },
      Escape: { what: "back", run: () => history.back() },
    });
  }
}

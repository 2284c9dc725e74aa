// @ts-check
/** All tasks of a run, with the change of their rewards. */

import { go, keep, link } from "../core/address.js";
import { get } from "../core/api.js";
import { byId, fill, h } from "../core/dom.js";
import { count, difference, many, reward } from "../core/format.js";
import { bind } from "../frame/keyboard.js";
import { empty, title } from "../frame/shell.js";

/** @typedef {{task: string, env: string, attempts: number, failed: number, first_step: number, last_step: number, reward_first: number|null, reward_last: number|null, reward_mean: number|null}} TaskLine */

const PAGE = 100;
const COLUMNS = [
  ["task", "Task"], ["attempts", "Attempts"], ["failed", "Failed"], ["first_step", "First step"], ["last_step", "Last step"],
  ["reward_first", "First visit"], ["reward_last", "Last visit"], ["gain", "Gain"], ["reward_mean", "Mean"],
];

/** @param {import("../app.js").Page} page */
export async function show(page) {
  title("tasks", page.run.name);
  const tasks = new TasksPage(page);
  await tasks.load();
  page.onChange((state, before) => before && state.rollouts !== before.rollouts && tasks.load());
}

/** The state of the page: the order, and the position in the list. */
class TasksPage {
  /** @param {import("../app.js").Page} page */
  constructor(page) {
    this.page = page;
    /** @type {Record<string, string>} */
    this.query = { phase: page.run.phases.includes("train") ? "train" : "", ...page.query };
    this.current = 0;
    bind({
      "j ArrowDown": { what: "next task", run: () => this.point(this.current + 1) },
      "k ArrowUp": { what: "previous task", run: () => this.point(this.current - 1) },
      Enter: { what: "open the task", run: () => this.open() },
      "/": { what: "the phase", run: () => byId("filter-phase").focus() },
      Escape: { what: "back", run: () => history.back() },
    });
  }

  get sort() {
    return this.query.sort ?? "last_step";
  }

  get order() {
    return this.query.order ?? (this.query.sort ? "asc" : "desc");
  }

  async load() {
    const offset = Number(this.query.offset ?? 0);
    const found = await get(["runs", this.page.run.run, "tasks"], { sort: this.sort, order: this.order, phase: this.query.phase, offset: String(offset), limit: PAGE }, this.page.signal);
    if (this.page.signal.aborted) return;
    /** @type {TaskLine[]} */
    this.rows = found.rows;
    fill(this.page.main, h("h1", null, "Tasks"), this.bar(found.total, offset),
      found.rows.length ? h("div", { class: "table-scroll" }, this.table(found.rows)) : empty("There is no task with a rollout in this phase.", "Choose another phase."));
    this.point(this.current);
  }

  /**
   * @param {number} total
   * @param {number} offset
   */
  bar(total, offset) {
    const phase = h("select", { id: "filter-phase", "aria-label": "phase", onchange: () => this.change({ phase: phase.value, offset: "" }) },
      h("option", { value: "" }, "any phase"), this.page.run.phases.map((one) => h("option", { value: one, selected: one === this.query.phase }, one)));
    const turn = (/** @type {string} */ words, /** @type {number} */ to, /** @type {boolean} */ isThere) => h("button", { type: "button", disabled: !isThere, onclick: () => this.change({ offset: to ? String(to) : "" }) }, words);
    const pages = total > PAGE && [turn("Previous", Math.max(0, offset - PAGE), offset > 0), h("span", { class: "hint" }, `${count(offset + 1)} to ${count(Math.min(total, offset + PAGE))}`), turn("Next", offset + PAGE, offset + PAGE < total)];
    return h("div", { class: "bar" }, phase, h("span", { class: "count" }, many(total, "task")), pages, h("span", { class: "grow" }), h("span", { class: "hint" }, "A visit is one group: its mean reward at the first and the last step that had the task."));
  }

  /** @param {Record<string, string>} changes */
  change(changes) {
    Object.assign(this.query, changes);
    keep(this.query);
    this.current = 0;
    this.load();
  }

  /** @param {TaskLine[]} rows */
  table(rows) {
    const head = COLUMNS.map(([name, words]) => {
      const isBy = this.sort === name;
      return h("th", { scope: "col", class: name === "task" ? "" : "n", "aria-sort": isBy ? (this.order === "desc" ? "descending" : "ascending") : null },
        h("button", { type: "button", class: "sort", onclick: () => this.change({ sort: name, order: isBy && this.order === "asc" ? "desc" : "asc", offset: "" }) }, words, isBy && h("span", { "aria-hidden": "true" }, this.order === "desc" ? " ↓" : " ↑")));
    });
    return h("table", { class: "plain tasks" }, h("thead", null, h("tr", null, head)), this.body = h("tbody", null, rows.map((row, place) => this.row(row, place))));
  }

  /**
   * @param {TaskLine} row
   * @param {number} place
   */
  row(row, place) {
    const gain = row.reward_first === null || row.reward_last === null || row.first_step === row.last_step ? null : row.reward_last - row.reward_first;
    return h("tr", { onclick: () => this.point(place) },
      h("td", null, h("a", { href: link([this.page.run.run, "task"], { task: row.task }) }, row.task)),
      h("td", { class: "n" }, count(row.attempts)), h("td", { class: `n ${row.failed ? "bad" : ""}` }, count(row.failed)), h("td", { class: "n" }, row.first_step), h("td", { class: "n" }, row.last_step),
      h("td", { class: "n" }, reward(row.reward_first)), h("td", { class: "n" }, reward(row.reward_last)),
      h("td", { class: `n ${gain === null || !gain ? "" : gain < 0 ? "lower" : "higher"}` }, difference(gain)), h("td", { class: "n" }, reward(row.reward_mean)));
  }

  /** @param {number} place */
  point(place) {
    this.current = Math.max(0, Math.min((this.rows?.length ?? 1) - 1, place));
    this.body?.querySelectorAll("tr").forEach((row, at) => row.classList.toggle("current", at === this.current));
    if (this.current) this.body?.children[this.current]?.scrollIntoView({ block: "nearest" });
  }

  open() {
    const row = this.rows?.[this.current];
    if (row) go(link([this.page.run.run, "task"], { task: row.task }));
  }
}

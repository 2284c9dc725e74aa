// @ts-check
/** The settings of a run, compared with those of another run. */

import { keep } from "../core/address.js";
import { get } from "../core/api.js";
import { byId, fill, h } from "../core/dom.js";
import { metric, many, setting } from "../core/format.js";
import { bind } from "../frame/keyboard.js";
import { empty, title } from "../frame/shell.js";

/** @typedef {import("../core/contract.js").Run} Run */

/** @param {import("../app.js").Page} page */
export async function show(page) {
  title("settings", page.run.name);
  await new SettingsPage(page).draw();
  bind({
    "/": { what: "find a setting", run: () => byId("search").focus() },
    Escape: { what: "back", run: () => history.back() },
  });
}

/** The state of the page: the search text, and the other run. */
class SettingsPage {
  /** @param {import("../app.js").Page} page */
  constructor(page) {
    this.page = page;
    this.query = { ...page.query };
    this.tables = h("div", { class: "settings-tables" });
    /** @type {Run|null} */
    this.other = null;
  }

  async draw() {
    const { page } = this;
    const search = h("input", { type: "search", id: "search", class: "wide", placeholder: "Find a setting ( / )", "aria-label": "Find a setting", value: this.query.q ?? "", oninput: () => this.change({ q: search.value }) });
    const others = page.runs.filter((run) => run.run !== page.run.run);
    const other = h("select", { "aria-label": "compare with", onchange: () => this.change({ with: other.value }) }, h("option", { value: "" }, "compare with another run"), others.map((run) => h("option", { value: run.run, selected: run.run === this.query.with }, run.name)));
    const only = h("input", { type: "checkbox", id: "only", checked: this.query.only === "1", onchange: () => this.change({ only: only.checked ? "1" : "" }) });
    fill(page.main, h("h1", null, "Settings"), h("p", { class: "hint" }, page.run.folder),
      h("div", { class: "bar" }, search, others.length > 0 && other, h("label", { class: "toggle", for: "only" }, only, " only differences")), this.tables);
    await this.load();
  }

  /** @param {Record<string, string>} changes */
  async change(changes) {
    Object.assign(this.query, changes);
    keep(this.query);
    await this.load();
  }

  async load() {
    const wanted = this.query.with;
    if (!wanted) this.other = null;
    else if (this.other?.run !== wanted) this.other = await get(["runs", wanted], {}, this.page.signal);
    if (this.page.signal.aborted) return;
    const { run } = this.page;
    const made = [
      this.table("Settings", run.settings, this.other?.settings),
      this.table("Versions", { ...run.versions, ...prefixed("env ", run.env) }, this.other && { ...this.other.versions, ...prefixed("env ", this.other.env) }),
      run.summary && this.table("Summary", run.summary, this.other?.summary),
    ].filter(Boolean);
    fill(this.tables, made.length ? made : empty(this.query.q ? "No setting has this in its name or value." : "These two runs have the same settings.", "Search for another word, or remove the filter."));
  }

  /**
   * @param {string} name
   * @param {Record<string, any>} own
   * @param {Record<string, any>|null|undefined} others
   */
  table(name, own, others) {
    const names = [...new Set([...Object.keys(own ?? {}), ...Object.keys(others ?? {})])];
    const look = (this.query.q ?? "").toLowerCase();
    const rows = names.map((key) => ({ key, a: shown(own?.[key]), b: others ? shown(others[key]) : null }))
      .filter(({ key, a, b }) => `${key} ${a} ${b ?? ""}`.toLowerCase().includes(look))
      .filter(({ a, b }) => this.query.only !== "1" || b === null || a !== b);
    if (!rows.length) return null;
    const differing = rows.filter(({ a, b }) => b !== null && a !== b).length;
    return h("section", null, h("h2", null, name, others && h("span", { class: "hint" }, ` ${many(differing, "difference")}`)),
      h("div", { class: "table-scroll" }, h("table", { class: "plain settings" },
        others && h("thead", null, h("tr", null, h("th", { scope: "col" }, "name"), h("th", { scope: "col" }, this.page.run.name), h("th", { scope: "col" }, this.other?.name))),
        h("tbody", null, rows.map(({ key, a, b }) => h("tr", { class: b !== null && a !== b ? "differs" : "" }, h("th", { scope: "row" }, key), h("td", { class: "mono" }, a), b !== null && h("td", { class: "mono" }, b)))))));
  }
}

/** @param {any} value */
const shown = (value) => (value === undefined ? "–" : typeof value === "number" && !Number.isInteger(value) ? metric(value, 6) : setting(value));

/**
 * @param {string} before
 * @param {Record<string, any>} values
 */
const prefixed = (before, values) => Object.fromEntries(Object.entries(values ?? {}).map(([name, value]) => [before + name, value]));

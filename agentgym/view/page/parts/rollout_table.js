// @ts-check
/** The columns and rows of the rollout table. */

import { link } from "../core/address.js";
import { h } from "../core/dom.js";
import { count, duration, reward } from "../core/format.js";
import { icon } from "../frame/icons.js";
import { marked } from "./search_text.js";

/** @typedef {import("../core/contract.js").RolloutLine} RolloutLine */
/** @typedef {{name: string, words: string, sort: string|null, numeric: boolean}} Column */

/** @type {Column[]} */
const COLUMNS = [
  { name: "number", words: "#", sort: "number", numeric: true },
  { name: "phase", words: "Phase", sort: null, numeric: false },
  { name: "step", words: "Step", sort: "step", numeric: true },
  { name: "task", words: "Rollout", sort: "task", numeric: false },
  { name: "reward", words: "Reward", sort: "reward", numeric: true },
  { name: "stop", words: "Stopped by", sort: "stop", numeric: false },
  { name: "turns", words: "Turns", sort: "turns", numeric: true },
  { name: "tokens", words: "Tokens", sort: "tokens", numeric: true },
  { name: "seconds", words: "Time", sort: "seconds", numeric: true },
  { name: "tool_errors", words: "Tool errors", sort: "tool_errors", numeric: true },
  { name: "notes", words: "Notes", sort: null, numeric: false },
];

/**
 * Returns the head of the table. A click on a column sorts by it, and a second click reverses the order.
 * @param {{sort: string, order: string}} by
 * @param {(sort: string) => void} sortBy
 */
export function head(by, sortBy) {
  return h("div", { class: "head", role: "row", "data-head": "" }, COLUMNS.map((column) => headCell(column, by, sortBy)));
}

/**
 * @param {Column} column
 * @param {{sort: string, order: string}} by
 * @param {(sort: string) => void} sortBy
 */
function headCell(column, by, sortBy) {
  const isBy = column.sort !== null && by.sort === column.sort;
  const order = by.order === "desc" ? "descending" : "ascending";
  const arrow = isBy ? h("span", { "aria-hidden": "true" }, by.order === "desc" ? " ↓" : " ↑") : null;
  const props = { class: `c-${column.name}${column.numeric ? " n" : ""}`, role: "columnheader", "aria-sort": isBy ? order : null };
  if (!column.sort) return h("div", props, column.words);
  return h("div", props, h("button", { type: "button", class: "sort", onclick: () => sortBy(String(column.sort)) }, column.words, arrow));
}

/**
 * Returns a row of the table.
 * @param {string} run
 * @param {RolloutLine|null} row null while it is being loaded
 * @param {number} index
 * @param {string} search the search text
 * @param {number} rowHeight
 * @param {() => void} opened
 */
export function tableRow(run, row, index, search, rowHeight, opened) {
  const props = { class: "row", role: "row", "aria-rowindex": index + 2, id: `row-${index}` };
  if (!row) return h("div", { ...props, class: "row waiting" }, h("div", { role: "gridcell", class: "c-task" }, "…"));
  const open = link([run, "rollout", row.number]);
  const cells = [
    cell("number", true, row.number),
    cell("phase", false, row.phase),
    cell("step", true, row.step),
    h("div", { role: "gridcell", class: "c-task" }, h("a", { href: open, tabindex: "-1", title: row.rollout_id, onclick: opened }, row.rollout_id)),
    h("div", { role: "gridcell", class: "c-reward n" }, row.reward === null ? h("span", { class: "bad" }, "failed") : reward(row.reward)),
    cell("stop", false, row.stop_reason),
    cell("turns", true, count(row.turns)),
    cell("tokens", true, count(row.tokens)),
    cell("seconds", true, duration(row.seconds)),
    h("div", { role: "gridcell", class: `c-tool_errors n${row.tool_errors ? " warn" : ""}` }, row.tool_errors === null ? "" : `${row.tool_errors} of ${row.tool_calls}`),
    h("div", { role: "gridcell", class: "c-notes" }, notes(row, search)),
  ];
  return h("div", { ...props, class: rowHeight > 40 ? "row tall" : "row", "data-number": row.number }, cells);
}

/**
 * @param {string} name
 * @param {boolean} numeric
 * @param {string|number} value
 */
function cell(name, numeric, value) {
  return h("div", { role: "gridcell", class: `c-${name}${numeric ? " n" : ""}`, title: numeric ? null : String(value) }, value);
}

/**
 * @param {RolloutLine} row
 * @param {string} search
 */
function notes(row, search) {
  const signs = row.suspicious.length ? h("span", { class: "sign", title: "suspicious" }, icon("warning"), row.suspicious.join(", ")) : null;
  const failure = row.failure ? h("span", { class: "bad", title: row.failure }, row.failure) : null;
  const snippet = row.snippet ? h("span", { class: "snippet", title: row.snippet }, marked(row.snippet, search)) : null;
  return [signs, failure, snippet];
}

// @ts-check
/** The filters of the rollout table: one field for each. All filters are stored in the address. */

import { fill, h } from "../core/dom.js";
import { many } from "../core/format.js";
import { spelled } from "../core/visible_text.js";

/** @typedef {Record<string, string>} Query */
/** @typedef {import("../core/contract.js").Run} Run */

/** Names of the filters, in the order of the bar. */
export const FILTERS = ["q", "phase", "env", "task", "stop", "step_from", "step_to", "reward_from", "reward_to", "failed", "suspicious", "tool_errors"];

const WAIT_MS = 200;

/**
 * Returns the filter bar, which calls `changed` when a filter changes.
 * @param {Run} run
 * @param {Query} query
 * @param {(name: string, value: string) => void} changed
 */
export function filterBar(run, query, changed) {
  const late = delayed(changed);
  const search = h("input", {
    type: "search", id: "search", class: "wide", value: query.q ?? "", "aria-label": "Search messages",
    placeholder: "Search messages ( / )", oninput: () => late("q", search.value),
  });
  const clear = h("button", { type: "button", class: "quiet", onclick: () => changed("", "") }, "Clear");
  return h("form", { class: "bar filters", role: "search", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
    search,
    choice("phase", "phase", run.phases, query, changed),
    run.envs.length > 1 && choice("env", "env", run.envs, query, changed),
    choice("stop", "stop reason", run.stop_reasons, query, changed),
    range("step", "Step", query, late, "1"),
    range("reward", "Reward", query, late, "any"),
    text("task", "Task", query, late),
    flag("failed", "failed", query, changed),
    flag("suspicious", "suspicious", query, changed),
    flag("tool_errors", "tool errors", query, changed),
    clear);
}

/**
 * @param {string} name
 * @param {string} words
 * @param {string[]} values
 * @param {Query} query
 * @param {(name: string, value: string) => void} changed
 */
function choice(name, words, values, query, changed) {
  const known = query[name] && !values.includes(query[name]) ? [query[name], ...values] : values;
  const field = h("select", { id: `filter-${name}`, "aria-label": words, class: query[name] ? "set" : "", onchange: () => {
    field.classList.toggle("set", field.value !== "");
    changed(name, field.value);
  } }, h("option", { value: "" }, `any ${words}`), known.map((value) => h("option", { value, selected: value === query[name] }, value)));
  return field;
}

/**
 * @param {string} name
 * @param {string} words
 * @param {Query} query
 * @param {(name: string, value: string) => void} changed
 * @param {string} step
 */
function range(name, words, query, changed, step) {
  const edge = (/** @type {string} */ end, /** @type {string} */ label) => {
    const field = h("input", { type: "number", step, id: `filter-${name}_${end}`, value: query[`${name}_${end}`] ?? "", placeholder: label, "aria-label": `${words} ${label}`, class: "edge", oninput: () => changed(`${name}_${end}`, field.value) });
    return field;
  };
  return h("span", { class: "field", role: "group", "aria-label": words }, h("span", { class: "label" }, words), edge("from", "from"), edge("to", "to"));
}

/**
 * @param {string} name
 * @param {string} words
 * @param {Query} query
 * @param {(name: string, value: string) => void} changed
 */
function text(name, words, query, changed) {
  const field = h("input", { type: "text", id: `filter-${name}`, class: "task", "aria-label": words, value: query[name] ?? "", placeholder: "task id", spellcheck: "false", oninput: () => changed(name, field.value.trim()) });
  return field;
}

/**
 * @param {string} name
 * @param {string} words
 * @param {Query} query
 * @param {(name: string, value: string) => void} changed
 */
function flag(name, words, query, changed) {
  const field = h("input", { type: "checkbox", id: `filter-${name}`, checked: query[name] === "1", onchange: () => changed(name, field.checked ? "1" : "") });
  return h("label", { class: "toggle", for: `filter-${name}` }, field, words);
}

/**
 * Returns a function that waits until the typing pauses.
 * @param {(name: string, value: string) => void} changed
 */
function delayed(changed) {
  /** A timer per filter, so that typing in one field doesn't cancel a change in another one. @type {Map<string, number>} */
  const timers = new Map();
  return (/** @type {string} */ name, /** @type {string} */ value) => {
    clearTimeout(timers.get(name));
    timers.set(name, window.setTimeout(() => changed(name, value), WAIT_MS));
  };
}

/**
 * Shows a histogram of the rewards; a click on a bar filters by its range.
 * @param {HTMLElement} place
 * @param {{edges: number[], counts: number[]}} found
 * @param {(from: number, to: number) => void} choose
 */
export function histogram(place, found, choose) {
  const most = Math.max(1, ...found.counts);
  const bars = found.counts.map((held, index) => {
    const [from, to] = [found.edges[index], found.edges[index + 1]];
    const words = `${many(held, "rollout")} with a reward from ${Number(from.toPrecision(3))} to ${Number(to.toPrecision(3))}`;
    const bar = h("span", { class: "bar-fill", style: { height: `${held ? Math.max(6, (100 * held) / most) : 0}%` } });
    return h("button", { type: "button", class: "bin", title: spelled(words), "aria-label": words, disabled: !held, onclick: () => choose(from, to) }, bar);
  });
  fill(place, bars);
}

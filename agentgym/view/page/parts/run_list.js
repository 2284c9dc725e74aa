// @ts-check
/** The list of runs, each with a checkbox that shows or hides its curves. */

import { link } from "../core/address.js";
import { h } from "../core/dom.js";
import { count, many, moment, reward } from "../core/format.js";
import { shortNames } from "../core/run_names.js";

/** @typedef {import("../core/contract.js").RunLine} RunLine */

/**
 * Returns the list, which calls `changed` with the selected runs, in the list's order.
 * @param {RunLine[]} runs
 * @param {Map<string, number>} colors of the selected runs
 * @param {(chosen: string[]) => void} changed
 */
export function runList(runs, colors, changed) {
  const ticked = new Set(colors.keys());
  const tick = (/** @type {RunLine} */ run, /** @type {boolean} */ on) => {
    if (on) ticked.add(run.run);
    else ticked.delete(run.run);
    changed(runs.map((one) => one.run).filter((id) => ticked.has(id)));
  };
  const only = (/** @type {RunLine} */ run) => {
    ticked.clear();
    tick(run, true);
  };
  const items = (/** @type {RunLine["kind"]} */ kind) => {
    const alike = runs.filter((run) => run.kind === kind);
    const names = shortNames(alike.map((run) => run.name));
    return alike.map((run) => item(run, names.get(run.name) ?? run.name, colors.get(run.run), tick, only));
  };
  const evaluations = items("eval");
  return h("div", { class: "runs" }, h("ul", null, items("train")), evaluations.length > 0 && [h("h2", null, "Evaluations"), h("ul", null, evaluations)]);
}

/**
 * @param {RunLine} run
 * @param {string} name the displayed name
 * @param {number|undefined} color undefined if the run is not drawn
 * @param {(run: RunLine, on: boolean) => void} tick
 * @param {(run: RunLine) => void} only
 */
function item(run, name, color, tick, only) {
  const id = `run-${run.run}`;
  if (run.kind === "eval") return evaluation(run, name);
  const box = h("input", { type: "checkbox", id, value: run.run, checked: color !== undefined, onchange: () => tick(run, box.checked) });
  const steps = run.steps ? `${count(run.steps_done)} of ${many(run.steps, "step")}` : many(run.steps_done, "step");
  return h("li", { class: color === undefined ? "not-drawn" : `run-${color}` },
    box,
    h("label", { for: id, title: `${run.name}: ${run.folder}` }, h("span", { class: "swatch" }), h("span", { class: "name" }, name), run.live && h("span", { class: "live" }, "live")),
    h("span", { class: "last", title: "reward of the last step" }, reward(run.reward_last)),
    h("p", { class: "facts" }, h("span", null, steps), h("a", { href: link([run.run, "rollouts"]) }, `${count(run.rollouts)} rollouts`), failedOf(run),
      h("span", null, moment(run.begun)), h("button", { type: "button", class: "text", onclick: () => only(run) }, "only this")));
}

/** @param {RunLine} run */
function failedOf(run) {
  return run.failed ? h("a", { href: link([run.run, "failures"]), class: "bad" }, `${count(run.failed)} failed`) : null;
}

/**
 * @param {RunLine} run
 * @param {string} name the displayed name
 */
function evaluation(run, name) {
  return h("li", { class: "of-eval" },
    h("a", { href: link([run.run, "rollouts"]), class: "name", title: `${run.name}: ${run.folder}` }, name),
    h("span", { class: "last", title: "mean reward" }, reward(run.reward_last)),
    h("p", { class: "facts" }, h("span", null, `${count(run.rollouts)} rollouts`), failedOf(run), h("span", null, moment(run.begun))));
}

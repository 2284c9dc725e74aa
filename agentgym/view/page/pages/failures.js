// @ts-check
/** The failed rollouts, grouped by their errors. */

import { link } from "../core/address.js";
import { get } from "../core/api.js";
import { fill, h } from "../core/dom.js";
import { count, many } from "../core/format.js";
import { bind } from "../frame/keyboard.js";
import { empty, title } from "../frame/shell.js";

/** @typedef {{type: string, where: string|null, message: string, traceback: string, count: number, steps: [number, number], numbers: number[]}} FailureGroup */

/** @param {import("../app.js").Page} page */
export async function show(page) {
  title("failures", page.run.name);
  const draw = async () => {
    const found = await get(["runs", page.run.run, "failures"], {}, page.signal);
    if (!page.signal.aborted) drawn(page, found);
  };
  await draw();
  page.onChange((state, before) => before && state.rollouts !== before.rollouts && draw());
  bind({ Escape: { what: "back", run: () => history.back() } });
}

/**
 * @param {import("../app.js").Page} page
 * @param {{groups: FailureGroup[], failed: number, looked_at: number}} found
 */
function drawn(page, { groups, failed, looked_at }) {
  const opened = new Set([...page.main.querySelectorAll("details[open]")].map((one) => one.getAttribute("data-key")));
  if (!groups.length) return fill(page.main, h("h1", null, "Failures"), empty("No rollout of this run failed.", "Tool errors are results that the model read, not failures: filter the rollouts by tool errors to see them."));
  const latest = looked_at < failed ? ` Only the latest ${count(looked_at)} of them are grouped here.` : "";
  fill(page.main, h("h1", null, "Failures"),
    h("p", { class: "hint" }, `${many(failed, "rollout")} failed in ${many(groups.length, "different way")}.${latest} They have no reward, do not count toward any baseline and are not trained on.`),
    groups.map((group, place) => item(page.run.run, group, opened.size ? opened.has(key(group)) : place === 0)));
}

/** @param {FailureGroup} group */
const key = (group) => `${group.type} ${group.where ?? ""} ${group.message}`;

/**
 * @param {string} run
 * @param {FailureGroup} group
 * @param {boolean} isOpen
 */
function item(run, group, isOpen) {
  const [low, high] = group.steps;
  const steps = low === high ? `step ${low}` : `steps ${low} to ${high}`;
  return h("section", { class: "failure kind" },
    h("h2", null, group.type, h("span", { class: "badge" }, many(group.count, "rollout")), h("span", { class: "hint" }, steps)),
    h("p", null, group.message),
    group.where && h("p", { class: "mono" }, `at ${group.where}`),
    h("details", { open: isOpen, "data-key": key(group) }, h("summary", null, "Traceback"), h("pre", { tabindex: "0", "aria-label": "traceback" }, group.traceback)),
    h("p", { class: "chips" }, group.numbers.map((number) => h("a", { class: "chip", href: link([run, "rollout", number]) }, `#${number}`)), group.count > group.numbers.length && h("span", { class: "hint" }, `and ${group.count - group.numbers.length} more`)));
}

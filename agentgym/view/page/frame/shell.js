// @ts-check
/** The frame around every page: the breadcrumbs, the pages of the run, and the switches. */

import { link } from "../core/address.js";
import { byId, fill, h } from "../core/dom.js";
import { many } from "../core/format.js";
import { icon } from "./icons.js";
import { showHelp } from "./keyboard.js";
import { switchTheme } from "./theme.js";
import { spelled } from "../core/visible_text.js";

/** @typedef {import("../core/contract.js").Run} Run */

const TABS = [
  { page: "curves", title: "Curves" },
  { page: "rollouts", title: "Rollouts" },
  { page: "tasks", title: "Tasks" },
  { page: "failures", title: "Failures" },
  { page: "settings", title: "Settings" },
];

/**
 * Draws the frame for a page.
 * @param {Run|null} run null on the page of all runs
 * @param {string} page the tab that is open
 */
export function frame(run, page) {
  fill(
    byId("top"),
    h("a", { class: "home", href: "#/", "aria-label": "agentgym view: all runs" }, h("span", { class: "wordmark" }, "agentgym")),
    run && h("span", { class: "run-name", title: run.folder }, run.name),
    h("span", { id: "live" }),
    run && h("nav", { class: "tabs", "aria-label": "Pages of the run" }, TABS.map((tab) => tabLink(run, tab, page))),
    h("span", { class: "grow" }),
    h("button", { class: "quiet", type: "button", title: "Dark or light (d)", "aria-label": "Switch between dark and light", onclick: switchTheme }, icon("theme")),
    h("button", { class: "quiet", type: "button", title: "Keys (?)", "aria-label": "Show the keys", onclick: showHelp }, "?"),
  );
  if (run) showLive(run.live, run.steps_done, run.steps);
}

/**
 * @param {Run} run
 * @param {{page: string, title: string}} tab
 * @param {string} open
 */
function tabLink(run, tab, open) {
  const href = tab.page === "curves" ? link([], { runs: run.run }) : link([run.run, tab.page]);
  const failed = tab.page === "failures" && run.failed > 0 && h("span", { class: "badge" }, run.failed);
  return h("a", { href, "aria-current": tab.page === open ? "page" : null }, tab.title, failed);
}

/**
 * Shows in the frame whether the run is active.
 * @param {boolean} live
 * @param {number} done
 * @param {number|null} steps
 */
export function showLive(live, done, steps) {
  const place = document.getElementById("live");
  if (!place) return;
  fill(place, live ? h("span", { class: "live" }, `live, ${steps ? `${done} of ${many(steps, "step")}` : many(done, "step")} done`) : null);
}

/**
 * Sets the title of the browser's window.
 * @param {...string} parts the most specific first
 */
export function title(...parts) {
  document.title = spelled([...parts, "agentgym view"].join(" · "));
}

/**
 * Returns a sentence that replaces missing content.
 * @param {string} sentence
 * @param {string} [todo] what to do
 * @param {Node} [more]
 */
export function empty(sentence, todo, more) {
  return h("div", { class: "empty" }, h("p", null, sentence), todo && h("p", { class: "todo" }, todo), more);
}

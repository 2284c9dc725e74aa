// @ts-check
/** The entry point: opens the page that the address names, and another one when the address changes. */

import { current, link, go } from "./core/address.js";
import { get, Refused } from "./core/api.js";
import { byId, fill } from "./core/dom.js";
import { bindAlways, clearPageKeys, listen, showHelp } from "./frame/keyboard.js";
import { follow } from "./core/live.js";
import { empty, frame, showLive } from "./frame/shell.js";
import { switchTheme } from "./frame/theme.js";
import { show as compare } from "./pages/compare.js";
import { show as curves } from "./pages/curves.js";
import { show as failures } from "./pages/failures.js";
import { show as group } from "./pages/group.js";
import { show as rollout } from "./pages/rollout.js";
import { show as rollouts } from "./pages/rollouts.js";
import { show as settings } from "./pages/settings.js";
import { show as task } from "./pages/task.js";
import { show as tasks } from "./pages/tasks.js";

/**
 * The arguments of a page.
 * @typedef {object} Page
 * @property {HTMLElement} main the element to draw in
 * @property {string[]} path the parts of the address after the page's name
 * @property {Record<string, string>} query the page's filters
 * @property {AbortSignal} signal aborted when the page is left
 * @property {import("./core/contract.js").Run} run
 * @property {import("./core/contract.js").RunLine[]} runs
 * @property {(changed: (state: import("./core/contract.js").State, before: import("./core/contract.js").State|null) => void) => void} onChange
 */

/** The pages by name. `show` returns true if the page has set its scroll position itself. @type {Record<string, {tab: string, show: (page: Page) => Promise<void|boolean>}>} */
const PAGES = {
  rollouts: { tab: "rollouts", show: rollouts },
  rollout: { tab: "rollouts", show: rollout },
  compare: { tab: "rollouts", show: compare },
  group: { tab: "tasks", show: group },
  tasks: { tab: "tasks", show: tasks },
  task: { tab: "tasks", show: task },
  failures: { tab: "failures", show: failures },
  settings: { tab: "settings", show: settings },
};

let leaving = new AbortController();
/** Scroll position of each page when it was left, by its address. @type {Map<string, number>} */
const scrolled = new Map();
let openedAt = location.hash;

async function open() {
  leaving.abort();
  leaving = new AbortController();
  clearPageKeys();
  const signal = leaving.signal;
  const main = byId("main");
  main.setAttribute("aria-busy", "true");
  let isPlaced = false;
  try {
    isPlaced = (await opened(main, signal)) === true;
  } catch (error) {
    if (!signal.aborted) failed(main, error);
  }
  if (signal.aborted) return;
  main.removeAttribute("aria-busy");
  openedAt = location.hash;
  if (!isPlaced) window.scrollTo(0, scrolled.get(openedAt) ?? 0);
}

/**
 * @param {HTMLElement} main
 * @param {AbortSignal} signal
 */
async function opened(main, signal) {
  const { path, query } = current();
  const { runs } = await get(["runs"], {}, signal);
  const [name, rest] = path[0] === "compare" ? ["compare", path.slice(2)] : [path[1] ?? "", path.slice(2)];
  const id = path[0] === "compare" ? path[1] : path[0];
  if (!id) return curves({ main, path, query, signal, runs, run: /** @type {any} */ (null), onChange: () => {} });
  const page = PAGES[name];
  if (!page) return void go(link([], { runs: id }));
  const run = await get(["runs", id], {}, signal);
  if (signal.aborted) return false;
  frame(run, page.tab);
  return page.show({ main, path: rest, query, signal, runs, run, onChange: listener(run, signal) });
}

/**
 * Calls a page's listener when its run changes, after updating the frame.
 * @param {import("./core/contract.js").Run} run
 * @param {AbortSignal} signal
 * @returns {Page["onChange"]}
 */
function listener(run, signal) {
  return (changed) => {
    if (!run.live) return;
    follow(run.run, (state, before) => {
      showLive(state.live, state.steps_done, run.steps);
      changed(state, before);
    }, signal);
  };
}

/**
 * @param {HTMLElement} main
 * @param {unknown} error
 */
function failed(main, error) {
  const known = error instanceof Refused;
  const sentence = known ? error.message : `This page could not be drawn: ${error instanceof Error ? error.message : error}.`;
  if (!known) console.error(error);
  if (!byId("top").hasChildNodes()) frame(null, "");
  fill(main, empty(sentence, known && error.status === 404 ? "The link may belong to another run; choose one on the first page (press h)." : undefined));
}

bindAlways({
  "?": { what: "show the keys", run: showHelp },
  h: { what: "all runs and their curves", run: () => go("#/") },
  d: { what: "dark or light", run: switchTheme },
});
listen();
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
// Requests that were pending when a page was left are aborted on purpose, which isn't an error.
window.addEventListener("unhandledrejection", (event) => {
  if (event.reason instanceof DOMException && event.reason.name === "AbortError") event.preventDefault();
});
window.addEventListener("hashchange", () => {
  scrolled.set(openedAt, window.scrollY);
  open();
});
open();


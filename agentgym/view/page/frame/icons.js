// @ts-check
/** Icons, each 16 units wide, in the color of the text next to them. */

import { s } from "../core/dom.js";

const PATHS = {
  theme: "M8 1.5a6.5 6.5 0 1 0 0 13V1.5Z M8 1.5a6.5 6.5 0 0 1 0 13",
  search: "M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10Z M10.8 10.8 14 14",
  root: "M8 4.2a3.8 3.8 0 1 0 0 7.6a3.8 3.8 0 0 0 0-7.6Z",
  compaction: "M2 3h12 M4 6.3h8 M6 9.7h4 M7.4 13h1.2",
  fork: "M4 2v4.5a3 3 0 0 0 3 3h5 M9.5 7 12 9.5 9.5 12 M4 6v8",
  branch: "M4 14V2 M4 9.5c0-2.5 3-2.5 5-2.5h3 M9.5 4.5 12 7 9.5 9.5",
  subagent: "M8 7.5a2.6 2.6 0 1 0 0-5.2 2.6 2.6 0 0 0 0 5.2Z M3 14c.4-3 2.3-4.4 5-4.4s4.6 1.4 5 4.4",
  rerender: "M13.5 8A5.5 5.5 0 1 1 11.6 3.8 M11.8 1.2v3h-3",
  warning: "M8 1.8 15 14H1Z M8 6v4 M8 11.8v.6",
  previous: "M10 3 5 8l5 5",
  next: "M6 3l5 5-5 5",
  copy: "M5.5 5.5h8v8h-8Z M10.5 5.5v-3h-8v8h3",
};

/** @typedef {keyof typeof PATHS} IconName */

/**
 * Draws an icon that is hidden from screen readers, since the text next to it says the same.
 * @param {string} name an unknown name is drawn as the root
 */
export function icon(name) {
  const path = PATHS[/** @type {IconName} */ (name)] ?? PATHS.root;
  return s("svg", { class: `icon icon-${name in PATHS ? name : "root"}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: path }));
}

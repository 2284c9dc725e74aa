// @ts-check
/** A narrow map of a whole segment, which shows the policy's turns and their values. A click jumps to a position. */

import { h, s, styled } from "../core/dom.js";
import { classes } from "./colors.js";

/** @typedef {import("../core/contract.js").Segment} Segment */
/** @typedef {import("./colors.js").Measure} Measure */
/** @typedef {import("./colors.js").Range} Range */

/**
 * Returns the map of a segment; each turn has the color of its advantage, version or mask.
 * @param {Segment} segment
 * @param {Measure} measure
 * @param {Range} range
 * @param {(token: number) => void} go
 * @returns {{element: HTMLElement, show: (from: number, to: number) => void}}
 */
export function strip(segment, measure, range, go) {
  const whole = Math.max(1, segment.tokens);
  const turns = segment.turns.map((turn) => {
    const token = { index: turn.start, id: 0, text: "", sampled: true, trained: segment.trained && turn.advantage !== null, logprob: null, ratio: null, advantage: turn.advantage, version: turn.versions[0]?.[1] ?? null, turn: turn.number };
    return s("rect", { class: classes(token, measure, range), x: turn.start / whole, width: Math.max(0.0015, (turn.stop - turn.start) / whole), y: 0, height: 1 });
  });
  const seen = h("span", { class: "strip-seen" });
  const svg = s("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" }, turns);
  const element = h("div", { class: "strip", title: "The whole segment; click to jump to a position" }, svg, seen);
  element.addEventListener("click", (event) => {
    const box = element.getBoundingClientRect();
    go(Math.floor(((event.clientX - box.left) / box.width) * whole));
  });
  const show = (/** @type {number} */ from, /** @type {number} */ to) => styled(seen, { left: `${(100 * from) / whole}%`, width: `${Math.max(0.3, (100 * (to - from)) / whole)}%` });
  return { element, show };
}

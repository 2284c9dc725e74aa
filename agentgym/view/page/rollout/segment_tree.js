// @ts-check
/** The segments of a rollout as a tree: each one below the segment that it continues. */

import { h } from "../core/dom.js";
import { count, many } from "../core/format.js";
import { icon } from "../frame/icons.js";

/** @typedef {import("../core/contract.js").Segment} Segment */

/**
 * Returns the tree, in which the selected segment is marked.
 * @param {Segment[]} segments
 * @param {number} chosen
 * @param {(segment: number) => string} href
 * @param {(segment: number) => void} open
 */
export function segmentTree(segments, chosen, href, open) {
  /** @type {(segment: Segment) => HTMLElement} */
  const item = (segment) => {
    const children = segments.filter((one) => one.parent === segment.index);
    return h("li", { class: chainOf(segment, segments) ? "chain" : "" }, entry(segment, segment.index === chosen, href, open), children.length > 0 && h("ul", null, children.map(item)));
  };
  return h("nav", { class: "tree", "aria-label": "Segments" }, h("h2", null, segments.length === 1 ? "One segment" : `${count(segments.length)} segments`), h("ul", null, segments.filter((one) => one.parent === null).map(item)));
}

/**
 * Returns whether a segment only continues its parent, so that a long chain of compactions is a flat list.
 * @param {Segment} segment
 * @param {Segment[]} segments
 */
function chainOf(segment, segments) {
  return segment.kind === "compaction" || segment.kind === "rerender" ? segments.filter((one) => one.parent === segment.parent).length === 1 : false;
}

/**
 * @param {Segment} segment
 * @param {boolean} isChosen
 * @param {(segment: number) => string} href
 * @param {(segment: number) => void} open
 */
function entry(segment, isChosen, href, open) {
  const notes = [segment.branch, segment.role, segment.model && `by ${segment.model}`, !segment.trained && "not trained"].filter(Boolean).join(", ");
  return h("a", { href: href(segment.index), "aria-current": isChosen ? "true" : null, onclick: (/** @type {MouseEvent} */ event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    open(segment.index);
  } },
  icon(segment.kind), h("span", { class: "kind" }, `${segment.index} ${segment.kind}`), h("span", { class: "size" }, `${many(segment.turns.length, "turn")} · ${count(segment.sampled)}/${count(segment.tokens)}`),
  notes && h("span", { class: "notes" }, notes));
}

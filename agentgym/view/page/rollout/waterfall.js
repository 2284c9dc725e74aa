// @ts-check
/** The times of a rollout: one bar for each wait, generation, response and scoring. */

import { h, s } from "../core/dom.js";
import { duration, percent } from "../core/format.js";
import { linear, ticks } from "../charts/scale.js";

/** @typedef {import("../core/contract.js").Span} Span */

const ROW = 18;
const LABEL = 130;
const MOST = 400;
/** The description and color of each kind of time, in chronological order. @type {Record<string, {words: string, part: number}>} */
const KINDS = {
  open: { words: "before the first turn: sandbox, reset", part: 3 },
  wait: { words: "waiting for the engine", part: 4 },
  generate: { words: "model generating", part: 0 },
  tool: { words: "tools and env", part: 1 },
  score: { words: "scoring and closing", part: 2 },
};

/** @param {string} what */
const kindOf = (what) => KINDS[what] ?? { words: what, part: 4 };

/**
 * Returns the waterfall, with the sum of each kind above it.
 * @param {Span[]} spans
 * @param {boolean} isExact whether start times were measured, and not only durations
 * @param {number} width
 */
export function waterfall(spans, isExact, width) {
  if (!spans.length) return h("p", { class: "empty" }, "This rollout has no times: the run did not measure them.");
  const rows = rowsOf(spans);
  const isCut = rows.length > MOST;
  const note = isExact ? null : h("p", { class: "hint" }, "Only the durations are known; the pieces are placed one after another.");
  const place = h("div", { class: "waterfall" }, drawn(rows.slice(0, MOST), spans, width));
  const all = isCut && h("button", { type: "button", class: "more", onclick: (/** @type {Event} */ event) => {
    place.replaceChildren(drawn(rows, spans, width));
    /** @type {HTMLElement} */ (event.target).remove();
  } }, `Show all ${rows.length} rows`);
  return h("section", null, sums(spans), note, place, all, table(spans));
}

/**
 * @param {Span[]} spans
 * @returns {{name: string, spans: Span[]}[]}
 */
function rowsOf(spans) {
  /** @type {Map<string, Span[]>} */
  const found = new Map();
  for (const span of spans) {
    const name = span.turn === null ? `segment ${span.segment}` : `segment ${span.segment}, turn ${span.turn}`;
    found.set(name, [...(found.get(name) ?? []), span]);
  }
  return [...found].map(([name, held]) => ({ name, spans: held }));
}

/** @param {Span[]} spans */
function totals(spans) {
  /** @type {Map<string, number>} */
  const found = new Map();
  for (const span of spans) found.set(span.what, (found.get(span.what) ?? 0) + span.to_s - span.from_s);
  const order = Object.keys(KINDS);
  return [...found].sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
}

/** @param {Span[]} spans */
function sums(spans) {
  const found = totals(spans);
  const whole = found.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  return h("div", { class: "sums" },
    h("div", { class: "sum-bar", "aria-hidden": "true" }, found.map(([what, seconds]) => h("span", { class: `part-${kindOf(what).part} sum-part`, style: { width: `${(100 * seconds) / whole}%` } }))),
    h("ul", null, found.map(([what, seconds]) => h("li", { class: `part-${kindOf(what).part}` }, h("span", { class: "swatch" }), `${kindOf(what).words}: `, h("strong", null, duration(seconds)), ` (${percent(seconds / whole)})`))));
}

/**
 * @param {{name: string, spans: Span[]}[]} rows
 * @param {Span[]} spans
 * @param {number} width
 */
function drawn(rows, spans, width) {
  const end = spans.reduce((most, span) => Math.max(most, span.to_s), 0) || 1;
  const x = linear([0, end], [LABEL, width - 60]);
  const height = rows.length * ROW + 26;
  const lines = ticks([0, end], 6).map((value) => [
    s("line", { class: "grid", x1: x(value), x2: x(value), y1: 18, y2: height }),
    s("text", { class: "tick", x: x(value), y: 11, "text-anchor": "middle" }, duration(value)),
  ]);
  const bars = rows.map((row, place) => [
    s("text", { class: "tick", x: 0, y: 22 + place * ROW + 12 }, row.name),
    row.spans.map((span) => bar(span, x, 22 + place * ROW)),
  ]);
  return s("svg", { width, height, role: "img", "aria-label": `Times of ${rows.length} rows over ${duration(end)}; the table below has the same` }, lines, bars);
}

/**
 * @param {Span} span
 * @param {(value: number) => number} x
 * @param {number} y
 */
function bar(span, x, y) {
  const width = Math.max(1.5, x(span.to_s) - x(span.from_s));
  const title = s("title", null, `${kindOf(span.what).words}: ${duration(span.to_s - span.from_s)}, from ${duration(span.from_s)}`);
  return s("rect", { class: `span part-${kindOf(span.what).part}`, x: x(span.from_s), y: y + 2, width, height: ROW - 5, rx: 2 }, title);
}

/** @param {Span[]} spans */
function table(spans) {
  const held = h("details", { class: "times" }, h("summary", null, "Show as a table"));
  held.addEventListener("toggle", () => {
    const rows = spans.map((span) => h("tr", null, h("td", null, span.segment), h("td", null, span.turn ?? ""), h("td", null, span.what), h("td", { class: "n" }, duration(span.from_s)), h("td", { class: "n" }, duration(span.to_s - span.from_s))));
    held.append(h("table", { class: "plain" }, h("thead", null, h("tr", null, ["segment", "turn", "what"].map((word) => h("th", { scope: "col" }, word)), ["from", "took"].map((word) => h("th", { scope: "col", class: "n" }, word)))), h("tbody", null, rows)));
  }, { once: true });
  return held;
}

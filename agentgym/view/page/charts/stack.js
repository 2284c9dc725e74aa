// @ts-check
/** Stacked parts of a whole over the steps, such as the parts of a step's time. */

import { s } from "../core/dom.js";

/** @typedef {{series: import("./series.js").Point[], metric: string}} Part */

/**
 * Returns the upper edge of each part at each x.
 * @param {Part[]} parts
 * @returns {{x: number, tops: number[]}[]}
 */
function columns(parts) {
  /** @type {Map<number, number[]>} */
  const found = new Map();
  parts.forEach(({ series }, place) => {
    for (const point of series) {
      const column = found.get(point.x) ?? new Array(parts.length).fill(0);
      column[place] = point.y;
      found.set(point.x, column);
    }
  });
  return [...found].sort((a, b) => a[0] - b[0]).map(([x, values]) => {
    let sum = 0;
    return { x, tops: values.map((value) => (sum += value)) };
  });
}

/**
 * Returns the range from 0 to the highest sum of the parts.
 * @param {Part[]} parts
 * @param {(point: {x: number}) => boolean} within
 * @returns {[number, number]}
 */
export function stackDomain(parts, within) {
  const sums = columns(parts).filter(within).map(({ tops }) => tops[tops.length - 1] ?? 0);
  return [0, Math.max(1e-9, ...sums) * 1.06];
}

/**
 * Draws the parts as areas, the first one lowest.
 * @param {Part[]} parts
 * @param {(x: number) => number} x
 * @param {(y: number) => number} y
 * @param {string[]} metrics
 */
export function drawStack(parts, x, y, metrics) {
  const all = columns(parts);
  return parts.map((part, place) => {
    const upper = all.map((column) => `${x(column.x).toFixed(1)},${y(column.tops[place]).toFixed(1)}`);
    const lower = all.map((column) => `${x(column.x).toFixed(1)},${y(place ? column.tops[place - 1] : 0).toFixed(1)}`).reverse();
    return s("polygon", { class: `area part-${metrics.indexOf(part.metric)}`, points: [...upper, ...lower].join(" ") });
  });
}

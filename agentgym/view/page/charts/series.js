// @ts-check
/** Metrics of runs as series of points, smoothed and thinned. */

/** @typedef {import("../core/contract.js").MetricsRow} MetricsRow */
/** @typedef {{x: number, y: number, step: number}} Point */
/** @typedef {{x: number, low: number, high: number}} BandPoint */

/**
 * Returns the points of one metric, without rows that lack it, or that lack a time if the axis is time.
 * @param {MetricsRow[]} rows
 * @param {string} name
 * @param {"step"|"time"} axis
 * @returns {Point[]}
 */
export function points(rows, name, axis) {
  const found = [];
  for (const row of rows) {
    const y = row.metrics[name];
    const x = axis === "time" ? row.time : row.step;
    if (y !== null && y !== undefined && x !== null) found.push({ x, y, step: row.step });
  }
  return found;
}

/**
 * Returns a band between two metrics, or of one metric around another if `around` is set.
 * @param {MetricsRow[]} rows
 * @param {string} low
 * @param {string} high
 * @param {"step"|"time"} axis
 * @param {boolean} around whether `low` is the middle, and `high` the distance from it to each edge
 * @returns {BandPoint[]}
 */
export function band(rows, low, high, axis, around) {
  const found = [];
  for (const row of rows) {
    const [a, b] = [row.metrics[low], row.metrics[high]];
    const x = axis === "time" ? row.time : row.step;
    if (a === null || a === undefined || b === null || b === undefined || x === null) continue;
    const edges = around ? { x, low: a - b, high: a + b } : { x, low: a, high: b };
    if (Number.isFinite(edges.low) && Number.isFinite(edges.high)) found.push(edges);
  }
  return found;
}

/**
 * Returns the exponential mean of the points up to each one, without a bias toward the start.
 * @param {Point[]} series
 * @param {number} weight below 1; 0 leaves the series unchanged
 * @returns {Point[]}
 */
export function smoothed(series, weight) {
  if (weight <= 0) return series;
  let [sum, share] = [0, 0];
  return series.map(({ x, y, step }) => {
    sum = weight * sum + (1 - weight) * y;
    share = weight * share + (1 - weight);
    return { x, y: sum / share, step };
  });
}

/**
 * Thins a series to the lowest and the highest point of each pixel, so that no peak is lost.
 * @param {Point[]} series in order of x
 * @param {(x: number) => number} place
 * @returns {Point[]}
 */
export function thinned(series, place) {
  if (series.length < 1200) return series;
  /** @type {Map<number, [Point, Point]>} */
  const columns = new Map();
  for (const point of series) {
    const column = Math.round(place(point.x));
    const held = columns.get(column);
    if (!held) columns.set(column, [point, point]);
    else columns.set(column, [point.y < held[0].y ? point : held[0], point.y > held[1].y ? point : held[1]]);
  }
  return [...columns.values()].flatMap(([low, high]) => (low === high ? [low] : low.x <= high.x ? [low, high] : [high, low]));
}

/**
 * Thins a band to its lowest and highest edge at each pixel.
 * @param {BandPoint[]} series in order of x
 * @param {(x: number) => number} place
 * @returns {BandPoint[]}
 */
export function thinnedBand(series, place) {
  if (series.length < 1200) return series;
  /** @type {Map<number, BandPoint>} */
  const columns = new Map();
  for (const point of series) {
    const column = Math.round(place(point.x));
    const held = columns.get(column);
    columns.set(column, held ? { x: held.x, low: Math.min(held.low, point.low), high: Math.max(held.high, point.high) } : point);
  }
  return [...columns.values()];
}

/**
 * Returns the point nearest to `x`, or undefined if there are no points.
 * @param {Point[]} series in order of x
 * @param {number} x
 * @returns {Point|undefined}
 */
export function nearest(series, x) {
  let [low, high] = [0, series.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (series[middle].x < x) low = middle;
    else high = middle;
  }
  const [a, b] = [series[low], series[high]];
  return !a || !b || Math.abs(a.x - x) <= Math.abs(b.x - x) ? a : b;
}

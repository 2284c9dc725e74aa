// @ts-check
/** Plans the charts: the metrics of the runs in the server's groups, with related metrics in one chart. */

/** @typedef {import("../core/contract.js").MetricGroup} MetricGroup */
/** @typedef {import("../core/contract.js").MetricsRow} MetricsRow */

/**
 * @typedef {object} Chosen one chart
 * @property {string} name the name of the chart and of its first metric
 * @property {"line"|"quantiles"|"stack"} kind
 * @property {string[]} metrics
 * @property {string} unit
 * @property {{low: string, high: string, around: boolean}|null} band
 * @property {string|null} dots a held-out metric that is drawn over the chart as points
 *
 * @typedef {{title: string, help: string, charts: Chosen[], still: {name: string, value: number}[]}} Section
 * @typedef {{count: number, first: number, isMoving: boolean}} Seen
 */

/** With fewer values than this, a metric may still change. */
const YOUNG = 3;
const QUANTILES = ["_p10", "_p50", "_p90", "_max"];
/** The parts of a step that do not overlap. */
const PARTS = ["time/collect", "time/train", "time/sync", "time/eval", "time/save"];

/**
 * Returns the sections of charts for the metrics in these rows; metrics that never change are only listed.
 * @param {MetricGroup[]} groups
 * @param {MetricsRow[][]} runs
 * @returns {Section[]}
 */
export function plan(groups, runs) {
  const seen = metricsIn(runs);
  const taken = new Set();
  const sections = groups.map((group) => section(group, seen, taken, runs.length));
  const rest = [...seen.keys()].filter((name) => !taken.has(name));
  const other = { title: "other", names: rest, unit: "", help: "Metrics that are in none of the groups above." };
  return [...sections, section(other, seen, taken, runs.length)].filter((one) => one.charts.length || one.still.length);
}

/**
 * @param {MetricsRow[][]} runs
 * @returns {Map<string, Seen>} each metric, and whether it changes
 */
function metricsIn(runs) {
  /** @type {Map<string, Seen>} */
  const seen = new Map();
  for (const rows of runs) {
    for (const row of rows) {
      for (const [name, value] of Object.entries(row.metrics)) {
        if (value === null) continue;
        const held = seen.get(name) ?? { count: 0, first: value, isMoving: false };
        seen.set(name, { count: held.count + 1, first: held.first, isMoving: held.isMoving || value !== held.first });
      }
    }
  }
  return seen;
}

/**
 * Returns whether to draw a metric: if it changes or has too few values to tell. The reward is always drawn.
 * @param {string} name
 * @param {Seen|undefined} seen
 */
function isDrawn(name, seen) {
  return name === "reward" || (seen !== undefined && (seen.isMoving || (seen.count < YOUNG && seen.first !== 0)));
}

/**
 * @param {MetricGroup} group
 * @param {Map<string, Seen>} seen
 * @param {Set<string>} taken
 * @param {number} runs
 * @returns {Section}
 */
function section(group, seen, taken, runs) {
  const own = [];
  for (const pattern of group.names) {
    for (const name of seen.keys()) {
      if (!taken.has(name) && matches(pattern, name)) {
        taken.add(name);
        own.push(name);
      }
    }
  }
  const moving = own.filter((name) => isDrawn(name, seen.get(name)));
  const still = own.filter((name) => !moving.includes(name)).map((name) => ({ name, value: seen.get(name)?.first ?? 0 }));
  return { title: group.title, help: group.help, charts: charts(moving, group.unit, seen, runs), still };
}

/**
 * @param {string} pattern
 * @param {string} name
 */
function matches(pattern, name) {
  if (pattern.endsWith("/*")) return name.startsWith(pattern.slice(0, -1));
  return pattern.startsWith("*/") ? name.endsWith(pattern.slice(1)) : pattern === name;
}

/**
 * @param {string[]} names
 * @param {string} unit
 * @param {Map<string, Seen>} seen
 * @param {number} runs
 * @returns {Chosen[]}
 */
function charts(names, unit, seen, runs) {
  const left = new Set(names);
  const found = [];
  if (runs === 1 && PARTS.filter((name) => left.has(name)).length > 1) found.push(stack(left, unit));
  for (const name of names) {
    if (!left.has(name)) continue;
    const stem = name.replace(/_(p10|p50|p90|max)$/, "");
    if (stem !== name && QUANTILES.every((end) => left.has(stem + end))) found.push(quantiles(stem, left, unit));
    else found.push(line(name, left, unit, seen));
  }
  return found;
}

/**
 * @param {Set<string>} left
 * @param {string} unit
 * @returns {Chosen}
 */
function stack(left, unit) {
  const metrics = PARTS.filter((name) => left.delete(name));
  return { name: "time by part", kind: "stack", metrics, unit, band: null, dots: null };
}

/**
 * @param {string} stem
 * @param {Set<string>} left
 * @param {string} unit
 * @returns {Chosen}
 */
function quantiles(stem, left, unit) {
  for (const end of QUANTILES) left.delete(stem + end);
  const band = { low: `${stem}_p10`, high: `${stem}_p90`, around: false };
  return { name: stem, kind: "quantiles", metrics: [`${stem}_p50`, `${stem}_max`], unit, band, dots: null };
}

/**
 * @param {string} name
 * @param {Set<string>} left
 * @param {string} unit
 * @param {Map<string, Seen>} seen
 * @returns {Chosen}
 */
function line(name, left, unit, seen) {
  left.delete(name);
  const spread = name === "reward" && seen.has("reward/std");
  const dots = name === "reward" && seen.has("eval/reward") ? "eval/reward" : null;
  return { name, kind: "line", metrics: [name], unit, band: spread ? { low: name, high: "reward/std", around: true } : null, dots };
}

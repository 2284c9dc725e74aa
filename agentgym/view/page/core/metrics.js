// @ts-check
/** The figures of runs, asked for once and then only what is new. */

import { get } from "./api.js";

/** @typedef {import("./contract.js").MetricsRow} MetricsRow */

/** @type {Map<string, {lines: number, rows: MetricsRow[]}>} */
const held = new Map();

/**
 * All figures of a run; those that are known are not asked for again.
 * @param {string} run
 * @param {AbortSignal} signal
 * @returns {Promise<MetricsRow[]>}
 */
export async function metrics(run, signal) {
  const known = held.get(run) ?? { lines: 0, rows: [] };
  const answer = await get(["runs", run, "metrics"], { after: known.lines || null }, signal);
  const isOther = answer.lines < known.lines; // a run that is resumed may have cut its last lines
  if (isOther) {
    held.delete(run);
    return metrics(run, signal);
  }
  const rows = known.rows.concat(answer.rows);
  held.set(run, { lines: answer.lines, rows });
  return rows;
}

// @ts-check
/** The metrics of runs; after the first request, only new lines are requested. */

import { get } from "./api.js";

/** @typedef {import("./contract.js").MetricsRow} MetricsRow */

/** @type {Map<string, {lines: number, mark: number, rows: MetricsRow[]}>} */
const held = new Map();

/**
 * Returns all metrics of a run, and requests only those that aren't known yet.
 * @param {string} run
 * @param {AbortSignal} signal
 * @returns {Promise<MetricsRow[]>}
 */
export async function metrics(run, signal) {
  const known = held.get(run);
  const answer = await get(["runs", run, "metrics"], known && { after: known.lines, mark: known.mark }, signal);
  const before = known && answer.from === known.lines ? known.rows : []; // a resumed run may have removed some
  const rows = before.concat(answer.rows);
  held.set(run, { lines: answer.lines, mark: answer.mark, rows });
  return rows;
}

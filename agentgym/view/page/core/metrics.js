// @ts-check
/** The metrics of runs, asked for once and then only what is new. */

import { get } from "./api.js";

/** @typedef {import("./contract.js").MetricsRow} MetricsRow */

/** @type {Map<string, {lines: number, mark: number, rows: MetricsRow[]}>} */
const held = new Map();

/**
 * All metrics of a run; those that are known are not asked for again.
 * @param {string} run
 * @param {AbortSignal} signal
 * @returns {Promise<MetricsRow[]>}
 */
export async function metrics(run, signal) {
  const known = held.get(run);
  const answer = await get(["runs", run, "metrics"], known && { after: known.lines, mark: known.mark }, signal);
  const before = known && answer.from === known.lines ? known.rows : []; // a run that is resumed may have cut some
  const rows = before.concat(answer.rows);
  held.set(run, { lines: answer.lines, mark: answer.mark, rows });
  return rows;
}

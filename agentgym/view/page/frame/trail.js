// @ts-check
/** The table that the reader filtered last, so that the next rollout is the next one in this table. */

import { link } from "../core/address.js";

/** @typedef {{run: string, query: Record<string, any>, index: number, number: number, total: number}} Place */

/** @type {Place|null} */
let last = null;

/**
 * Remembers the table and its row that was opened.
 * @param {Place} place
 */
export function remember(place) {
  last = place;
}

/**
 * Returns the position in the table from which a rollout was opened, or null if it was opened in another way.
 * @param {string} run
 * @param {number} number
 * @returns {Place|null}
 */
export function placeOf(run, number) {
  return last && last.run === run && last.number === number ? last : null;
}

/**
 * Returns the link to a run's table as it was last filtered.
 * @param {string} run
 */
export function tableOf(run) {
  return link([run, "rollouts"], last && last.run === run ? last.query : {});
}

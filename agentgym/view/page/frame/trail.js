// @ts-check
/** The way that the reader came: the table that was filtered last, so that the next rollout is the next one in it. */

import { link } from "../core/address.js";

/** @typedef {{run: string, query: Record<string, any>, index: number, number: number, total: number}} Place */

/** @type {Place|null} */
let last = null;

/**
 * Remembers the table, and which of its rows was opened.
 * @param {Place} place
 */
export function remember(place) {
  last = place;
}

/**
 * The place in the table that a rollout was opened from; null where it was opened in another way.
 * @param {string} run
 * @param {number} number
 * @returns {Place|null}
 */
export function placeOf(run, number) {
  return last && last.run === run && last.number === number ? last : null;
}

/**
 * The table of a run as it was last filtered.
 * @param {string} run
 */
export function tableOf(run) {
  return link([run, "rollouts"], last && last.run === run ? last.query : {});
}

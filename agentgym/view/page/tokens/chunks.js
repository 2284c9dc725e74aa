// @ts-check
/** A segment cut into chunks of tokens: a new one at each turn's start and end, and after so many tokens. */

/** @typedef {import("../core/contract.js").Segment} Segment */
/** @typedef {import("../core/contract.js").Turn} Turn */
/** @typedef {{from: number, to: number, turn: Turn|null, isFirst: boolean}} Chunk */

/** Tokens of the longest chunk. */
const LONGEST = 400;

/**
 * The chunks of a segment, in order and without gaps.
 * @param {Segment} segment
 * @returns {Chunk[]}
 */
export function chunks(segment) {
  const found = /** @type {Chunk[]} */ ([]);
  const stretch = (/** @type {number} */ from, /** @type {number} */ to, /** @type {Turn|null} */ turn) => {
    for (let start = from; start < to; start += LONGEST) found.push({ from: start, to: Math.min(to, start + LONGEST), turn, isFirst: start === from });
  };
  let end = 0;
  for (const turn of segment.turns) {
    stretch(end, turn.start, null);
    stretch(turn.start, turn.stop, turn);
    end = turn.stop;
  }
  stretch(end, segment.tokens, null);
  return found;
}

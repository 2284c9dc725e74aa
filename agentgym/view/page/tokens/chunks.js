// @ts-check
/** Splits a segment into chunks of tokens: at the start and end of each turn, and after a maximum number of tokens. */

/** @typedef {import("../core/contract.js").Segment} Segment */
/** @typedef {import("../core/contract.js").Turn} Turn */
/** @typedef {{from: number, to: number, turn: Turn|null, isFirst: boolean}} Chunk */

/** Maximum number of tokens in a chunk. */
const LONGEST = 400;

/**
 * Returns the chunks of a segment, in order and without gaps.
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

// @ts-check
/** The tokens of a segment, requested in pages. */

import { get } from "../core/api.js";

/** @typedef {import("./colors.js").Token} Token */
/** @typedef {import("../core/contract.js").Tokens} Tokens */

const PAGE = 4000;

/** The pages of one segment; each is requested once. */
export class TokenPages {
  /**
   * @param {string} run
   * @param {number} number
   * @param {number} segment
   * @param {AbortSignal} signal
   */
  constructor(run, number, segment, signal) {
    this.path = ["runs", run, "rollouts", number, "tokens"];
    this.segment = segment;
    this.signal = signal;
    /** @type {Map<number, Promise<Tokens>>} */
    this.pages = new Map();
    this.isNamed = true;
  }

  /** @param {number} place */
  page(place) {
    const held = this.pages.get(place) ?? get(this.path, { segment: String(this.segment), from: String(place * PAGE), count: PAGE }, this.signal);
    this.pages.set(place, held);
    return held;
  }

  /**
   * Returns the tokens from `from` up to, but not including, `to`.
   * @param {number} from
   * @param {number} to
   * @returns {Promise<Token[]>}
   */
  async tokens(from, to) {
    const found = [];
    for (let place = Math.floor(from / PAGE); place * PAGE < to; place++) {
      const page = await this.page(place);
      this.isNamed = page.named;
      for (let index = Math.max(from, page.from); index < Math.min(to, page.from + page.ids.length); index++) found.push(token(page, index));
    }
    return found;
  }
}

/**
 * @param {Tokens} page
 * @param {number} index
 * @returns {Token}
 */
function token(page, index) {
  const at = index - page.from;
  return {
    index,
    id: page.ids[at],
    text: page.texts[at],
    sampled: page.sampled[at] === 1,
    trained: page.trained[at] === null ? null : page.trained[at] === 1,
    logprob: page.logprobs[at],
    ratio: page.ratios[at],
    advantage: page.advantages[at],
    version: page.versions[at],
    turn: page.turns[at],
  };
}

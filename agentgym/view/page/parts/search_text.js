// @ts-check
/** Text with the words that were searched for marked in it. */

import { h } from "../core/dom.js";

/**
 * The words of a search, longest first, without the quotes of phrases.
 * @param {string} search
 * @returns {string[]}
 */
export function words(search) {
  const found = search.match(/"[^"]+"|[^\s"]+/g) ?? [];
  return found.map((word) => word.replace(/^"|"$/g, "")).filter(Boolean).sort((a, b) => b.length - a.length);
}

/**
 * Cuts a text into pieces, those that were searched for as `mark` elements.
 * @param {string} text
 * @param {string} search
 * @returns {(string|HTMLElement)[]}
 */
export function marked(text, search) {
  const wanted = words(search);
  if (!wanted.length) return [text];
  const pattern = new RegExp(`(${wanted.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "giu");
  return text.split(pattern).map((piece, place) => (place % 2 ? h("mark", null, piece) : piece)).filter((piece) => piece !== "");
}

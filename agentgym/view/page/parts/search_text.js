// @ts-check
/** Text with the words of a search highlighted. */

import { h } from "../core/dom.js";

/**
 * Returns the words of a search, longest first, without the quotes of phrases.
 * @param {string} search
 * @returns {string[]}
 */
export function words(search) {
  const found = search.match(/"[^"]+"|[^\s"]+/g) ?? [];
  return found.map((word) => word.replace(/^"|"$/g, "")).filter(Boolean).sort((a, b) => b.length - a.length);
}

/**
 * Splits a text into pieces, with the words of the search as `mark` elements.
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

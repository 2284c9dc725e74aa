// @ts-check
/** The text of one token, in which line feeds, tabs and empty text are visible. */

import { h } from "../core/dom.js";
import { visible } from "../core/visible_text.js";

/**
 * Returns the nodes of a token's text; a line feed is a mark followed by a new line.
 * @param {string} text
 * @returns {Node[]}
 */
export function tokenText(text) {
  if (text === "") return [sign("∅")];
  if (!/[\n\t]/.test(text)) return [visible(text)];
  return text.split(/(\n|\t)/).filter(Boolean).flatMap((piece) => {
    if (piece === "\n") return [sign("↵"), document.createTextNode("\n")];
    return piece === "\t" ? [sign("→"), document.createTextNode("\t")] : [visible(piece)];
  });
}

/** @param {string} shown */
const sign = (shown) => h("span", { class: "sign-of", "aria-hidden": "true" }, shown);

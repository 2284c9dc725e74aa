// @ts-check
/** The parts of a message as elements: text, tool calls and results, highlighted code, diffs and images. */

import { h } from "../core/dom.js";
import { count } from "../core/format.js";

/** @typedef {import("../core/contract.js").Block} Block */

/** Longer text is cut until the reader expands it. */
const LINES = 40;
const CHARACTERS = 6000;

/**
 * Returns a message's blocks. The arguments of a call are folded if their code is shown below.
 * @param {Block[]} blocks
 * @returns {HTMLElement[]}
 */
export function blockElements(blocks) {
  return blocks.map((block, place) => element(block, ["code", "diff"].includes(blocks[place + 1]?.kind)));
}

/**
 * @param {Block} block
 * @param {boolean} isFolded
 * @returns {HTMLElement}
 */
function element(block, isFolded) {
  if (block.kind === "call") return call(block, isFolded);
  if (block.kind === "code") return code(block);
  if (block.kind === "diff") return diff(block);
  if (block.kind === "image") return image(block);
  if (block.kind === "result") return result(block);
  if (block.kind === "thinking") return h("details", { class: "thinking", open: true }, h("summary", null, "thinking"), long(block.text ?? "", "p"));
  return h("div", { class: "text" }, long(block.text ?? "", "p"));
}

/**
 * @param {Block} block
 * @param {boolean} isFolded
 */
function call(block, isFolded) {
  const name = h("span", { class: "call-name" }, block.name || "(no readable tool name)");
  const given = long(block.arguments ?? "", "pre");
  if (!isFolded) return h("div", { class: "call" }, h("p", { class: "call-head" }, "calls ", name), given);
  return h("div", { class: "call" }, h("details", null, h("summary", { class: "call-head" }, "calls ", name), given));
}

/** @param {Block} block */
function result(block) {
  const head = block.is_error ? h("p", { class: "bad result-head" }, "error") : null;
  return h("div", { class: block.is_error ? "result failed" : "result" }, head, long(block.text ?? "", "pre"));
}

/** @param {Block} block */
function code(block) {
  const spans = block.spans ?? [["", block.text ?? ""]];
  const pieces = spans.map(([kind, text]) => (kind ? h("span", { class: `p-${kind}` }, text) : text));
  return h("pre", { class: "code", tabindex: "0", "aria-label": block.language ? `${block.language} code` : "code" }, h("code", null, pieces));
}

const SIGNS = { "+": "added", "-": "removed", "@": "place" };

/** @param {Block} block */
function diff(block) {
  const lines = (block.lines ?? []).map(([sign, text]) => h("span", { class: `diff-line ${SIGNS[/** @type {"+"} */ (sign)] ?? "same"}` },
    h("span", { class: "diff-sign", "aria-hidden": "true" }, sign), text, "\n"));
  return h("pre", { class: "code diff", tabindex: "0", "aria-label": "change" }, lines);
}

/** @param {Block} block */
function image(block) {
  if (!block.data_url) return h("p", { class: "hint" }, `An image (${block.mime ?? "unknown kind"}), whose data the run did not store.`);
  return h("img", { class: "image", src: block.data_url, alt: "an image of the conversation" });
}

/**
 * Returns text as an element; long text shows only its beginning, and a button for the rest.
 * @param {string} text
 * @param {"p"|"pre"} tag
 * @returns {HTMLElement}
 */
export function long(text, tag) {
  const shown = beginning(text);
  const element = h(tag, { class: "said", tabindex: tag === "pre" ? "0" : null, "aria-label": tag === "pre" ? "text" : null }, shown);
  if (shown.length === text.length) return element;
  const words = `Show all: ${count(text.split("\n").length)} lines, ${count(text.length)} characters`;
  const more = h("button", { type: "button", class: "more", onclick: () => whole.replaceChildren(h(tag, { class: "said" }, text)) }, words);
  const whole = h("div", null, element, more);
  return whole;
}

/** @param {string} text */
function beginning(text) {
  let end = -1;
  for (let line = 0; line < LINES; line++) {
    end = text.indexOf("\n", end + 1);
    if (end < 0) break;
  }
  const cut = Math.min(end < 0 ? text.length : end, CHARACTERS);
  return text.length - cut < 200 ? text : text.slice(0, cut);
}

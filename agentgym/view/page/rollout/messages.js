// @ts-check
/** The conversation of one segment: its opening messages, and then the model's message and the responses of each turn. */

import { h } from "../core/dom.js";
import { count, difference, duration, metric, many } from "../core/format.js";
import { icon } from "../frame/icons.js";
import { blockElements } from "./blocks.js";

/** @typedef {import("../core/contract.js").Segment} Segment */
/** @typedef {import("../core/contract.js").Turn} Turn */
/** @typedef {import("../core/contract.js").Message} Message */
/** @typedef {{href: (segment: number, view: string, at?: number) => string, open: (segment: number, view: string, at?: number) => void}} Ways */

/**
 * Returns the conversation of a segment; messages that its parent also has are folded.
 * @param {Segment[]} segments
 * @param {number} index
 * @param {Ways} ways
 * @returns {HTMLElement}
 */
export function conversation(segments, index, ways) {
  const segment = segments[index];
  const repeated = segment.parent === null ? 0 : repeats(segment, segments[segment.parent]);
  const children = segments.filter((one) => one.parent === index);
  const forks = placed(segment, children);
  return h("div", { class: "conversation" },
    head(segment, ways), tools(segment),
    h("ol", { class: "messages" },
      repeated > 0 && folded(segment, repeated, ways),
      segment.opening.slice(repeated).map((message) => messageItem(message, "")),
      segment.turns.map((turn) => [turnItem(segment, turn, ways), turn.answers.map((message) => messageItem(message, "")), (forks.get(turn) ?? []).map((child) => goesOn(child, ways))]),
      (forks.get(null) ?? []).map((child) => goesOn(child, ways))));
}

/**
 * Returns all messages of a segment in order.
 * @param {Segment} segment
 * @returns {Message[]}
 */
export function allMessages(segment) {
  return [...segment.opening, ...segment.turns.flatMap((turn) => [turn.message, ...turn.answers])];
}

/**
 * Returns how many of a segment's opening messages its parent also has.
 * @param {Segment} segment
 * @param {Segment} parent
 */
function repeats(segment, parent) {
  const before = allMessages(parent);
  let same = 0;
  while (same < segment.opening.length && same < before.length && JSON.stringify(segment.opening[same]) === JSON.stringify(before[same])) same++;
  return same;
}

/**
 * Returns the children by the turn after which they started, or by null if there is none. Turns are numbered over the whole rollout.
 * @param {Segment} segment
 * @param {Segment[]} children
 * @returns {Map<Turn|null, Segment[]>}
 */
function placed(segment, children) {
  /** @type {Map<Turn|null, Segment[]>} */
  const found = new Map();
  for (const child of children) {
    const first = child.turns[0]?.number ?? -1;
    const turn = segment.turns.findLast((one) => one.number < first) ?? null;
    found.set(turn, [...(found.get(turn) ?? []), child]);
  }
  return found;
}

/** @type {Record<string, string>} */
const KINDS = { compaction: "continues after a compaction", fork: "forks here", branch: "is a branch from here", subagent: "is a sub-agent that was started here", rerender: "continues with the chat rendered again" };

/**
 * @param {Segment} child
 * @param {Ways} ways
 */
function goesOn(child, ways) {
  return h("li", { class: "goes-on" }, icon(child.kind), way(`Segment ${child.index}`, child.index, "messages", ways), ` ${KINDS[child.kind] ?? child.kind}`);
}

/**
 * @param {string} words
 * @param {number} segment
 * @param {string} view
 * @param {Ways} ways
 * @param {number} [at]
 */
function way(words, segment, view, ways, at) {
  return h("a", { href: ways.href(segment, view, at), onclick: (/** @type {MouseEvent} */ event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    ways.open(segment, view, at);
  } }, words);
}

/**
 * @param {Segment} segment
 * @param {Ways} ways
 */
function head(segment, ways) {
  const from = segment.parent === null ? null : [" of ", way(`segment ${segment.parent}`, segment.parent, "messages", ways)];
  const facts = [many(segment.turns.length, "turn"), `${count(segment.tokens)} tokens, ${count(segment.sampled)} of them sampled`];
  if (segment.role) facts.push(`role ${segment.role}`);
  if (segment.model) facts.push(`by ${segment.model}`);
  if (!segment.trained) facts.push("not trained");
  return h("p", { class: "segment-head" }, h("strong", null, `Segment ${segment.index}: ${segment.kind}`), from, h("span", { class: "hint" }, facts.join(" · ")));
}

/** @param {Segment} segment */
function tools(segment) {
  if (!segment.tools.length) return null;
  const names = segment.tools.map((tool) => String(tool?.function?.name ?? tool?.name ?? "?"));
  return h("details", { class: "tools" }, h("summary", null, `Tools offered to the model: ${names.join(", ")}`), h("pre", { tabindex: "0", "aria-label": "schemas of the tools" }, JSON.stringify(segment.tools, null, 2)));
}

/**
 * @param {Segment} segment
 * @param {number} repeated
 * @param {Ways} ways
 */
function folded(segment, repeated, ways) {
  const held = h("details", { class: "folded" },
    h("summary", null, `${repeated} ${repeated === 1 ? "message" : "messages"} as in segment ${segment.parent}`));
  held.addEventListener("toggle", () => held.append(h("ol", { class: "messages" }, segment.opening.slice(0, repeated).map((message) => messageItem(message, "")))), { once: true });
  return h("li", null, held);
}

/**
 * @param {Message} message
 * @param {string} more a CSS class
 */
export function messageItem(message, more) {
  return h("li", { class: `message role-${known(message.role)} ${more}`.trim() }, h("p", { class: "role" }, message.role), h("div", { class: "blocks" }, blockElements(message.blocks)));
}

/** @param {string} role */
const known = (role) => (["system", "user", "assistant", "tool"].includes(role) ? role : "other");

/**
 * @param {Segment} segment
 * @param {Turn} turn
 * @param {Ways} ways
 */
function turnItem(segment, turn, ways) {
  return h("li", { class: "message role-assistant", id: `turn-${turn.number}` },
    h("p", { class: "role" }, turn.message.role),
    h("div", { class: "blocks" }, turnFacts(segment, turn, ways), blockElements(turn.message.blocks)));
}

/**
 * @param {Segment} segment
 * @param {Turn} turn
 * @param {Ways|null} ways
 */
export function turnFacts(segment, turn, ways) {
  const tokens = `${count(turn.stop - turn.start)} tokens`;
  const versions = [...new Set(turn.versions.map(([, version]) => version))];
  const facts = [
    h("span", { class: "turn-number" }, `turn ${turn.number}`),
    ways ? way(tokens, segment.index, "tokens", ways, turn.start) : tokens,
    turn.advantage === null ? null : h("span", { class: turn.advantage < 0 ? "lower" : turn.advantage > 0 ? "higher" : "" }, `advantage ${difference(turn.advantage)}`),
    turn.reward ? `reward ${difference(turn.reward)}` : null,
    turn.finish_reason === "stop" ? null : h("span", { class: "warn" }, `ended by ${turn.finish_reason}`),
    `${duration(turn.seconds)} to generate`,
    turn.env_seconds ? `${duration(turn.env_seconds)} to answer` : null,
    turn.gap !== null && turn.gap > 0.01 ? h("span", { class: turn.gap > 1 ? "warn" : "" }, `gap ${metric(turn.gap, 2)} nats`) : null,
    versions.length ? `policy ${versions.join(", ")}` : null,
  ];
  return h("p", { class: "turn-facts" }, facts.filter(Boolean).map((fact) => h("span", null, fact)));
}

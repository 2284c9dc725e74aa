// @ts-check
/** Two rollouts side by side, turn by turn, with the first turn in which they diverge. */

import { go, link } from "../core/address.js";
import { get } from "../core/api.js";
import { fill, h } from "../core/dom.js";
import { count, difference, duration, metric, reward } from "../core/format.js";
import { bind } from "../frame/keyboard.js";
import { empty, title } from "../frame/shell.js";
import { messageItem, turnFacts } from "../rollout/messages.js";
import { failure } from "../rollout/outcome.js";

/** @typedef {import("../core/contract.js").Rollout} Rollout */
/** @typedef {import("../core/contract.js").Segment} Segment */
/** @typedef {import("../core/contract.js").Turn} Turn */

/** @param {import("../app.js").Page} page */
export async function show(page) {
  const [a, b] = page.path.map(Number);
  if (!Number.isInteger(a) || !Number.isInteger(b)) return fill(page.main, empty("Two rollouts are needed to compare.", "Open a rollout and press c, or choose two on its group's page."));
  const ask = (/** @type {number} */ number) => get(["runs", page.run.run, "rollouts", number], {}, page.signal);
  const [left, right] = await Promise.all([ask(a), ask(b)]);
  if (page.signal.aborted) return;
  title(`${left.rollout_id} and ${right.rollout_id}`, page.run.name);
  draw(page, left, right);
}

/**
 * @param {import("../app.js").Page} page
 * @param {Rollout} left
 * @param {Rollout} right
 */
function draw(page, left, right) {
  const run = page.run.run;
  const parting = h("p", { class: "hint" });
  const rows = rowsOf(left, right);
  const first = rows.find((row) => !row.isSame);
  fill(parting, first ? h("button", { type: "button", class: "text", onclick: () => document.getElementById("parting")?.scrollIntoView({ block: "center" }) }, `They diverge in ${first.name}`) : "Their messages are the same.");
  fill(page.main, h("article", { class: "compare" },
    h("h1", null, "Two rollouts"), parting,
    h("div", { class: "pair heads" }, head(run, left, right, page), head(run, right, left, page, true)),
    h("div", { class: "pair" }, failure(left) ?? h("div"), failure(right) ?? h("div")),
    rows.map((row) => drawRow(row, row === first))));
  bind({
    "j ArrowDown": { what: "compare with the next of the group", run: () => beside(run, left, right, 1) },
    "k ArrowUp": { what: "compare with the previous of the group", run: () => beside(run, left, right, -1) },
    x: { what: "swap sides", run: () => go(link(["compare", run, right.number, left.number])) },
    p: { what: "where they diverge", run: () => document.getElementById("parting")?.scrollIntoView({ block: "center" }) },
    g: { what: "the group", run: () => go(groupOf(run, left)) },
    Enter: { what: "open the left one", run: () => go(link([run, "rollout", left.number])) },
    Escape: { what: "back", run: () => history.back() },
  });
}

/**
 * @param {string} run
 * @param {Rollout} rollout
 */
const groupOf = (run, rollout) => link([run, "group"], { phase: rollout.phase, step: rollout.step, task: rollout.task });

/**
 * @param {string} run
 * @param {Rollout} left
 * @param {Rollout} right
 * @param {number} by
 */
function beside(run, left, right, by) {
  const others = left.neighbors.group.filter((number) => number !== left.number);
  if (!others.length) return;
  const place = others.indexOf(right.number);
  go(link(["compare", run, left.number, others[(place + by + others.length) % others.length]]));
}

/**
 * @param {string} run
 * @param {Rollout} rollout
 * @param {Rollout} other
 * @param {import("../app.js").Page} page
 * @param {boolean} [isRight]
 */
function head(run, rollout, other, page, isRight) {
  const group = rollout.neighbors.group;
  const choice = h("select", { "aria-label": isRight ? "the right rollout" : "the left rollout", onchange: () => go(link(["compare", run, ...(isRight ? [other.number, choice.value] : [choice.value, other.number])])) },
    [...new Set([rollout.number, ...group])].sort((a, b) => a - b).map((number) => h("option", { value: number, selected: number === rollout.number }, `#${number}`)));
  const facts = [
    ["reward", rollout.reward === null ? "failed" : reward(rollout.reward)],
    ["stopped by", rollout.stop_reason],
    ["turns", count(turns(rollout))],
    ["tokens sampled", count(rollout.segments.reduce((sum, segment) => sum + segment.sampled, 0))],
    ["segments", count(rollout.segments.length)],
    ["advantage", difference(rollout.segments.flatMap((segment) => segment.turns).find((turn) => turn.advantage !== null)?.advantage)],
    ["time", duration(rollout.metrics.seconds)],
    ...Object.entries(rollout.rewards).map(([name, value]) => [`reward ${name}`, metric(value)]),
  ];
  return h("section", { class: "panel" },
    h("h2", null, choice, " ", h("a", { href: link([run, "rollout", rollout.number]) }, rollout.rollout_id), ` step ${rollout.step}`),
    h("dl", { class: "facts-grid" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))));
}

/** Returns the turns of a rollout, without those of its branches.
 * @param {Rollout} rollout
 */
const turns = (rollout) => rollout.segments.filter((segment) => segment.branch === null).reduce((sum, segment) => sum + segment.turns.length, 0);

/** @typedef {{name: string, left: Cell|null, right: Cell|null, isSame: boolean, isHead: boolean}} Row */
/** @typedef {{segment: Segment, turn: Turn|null}} Cell */

/**
 * Returns the rows: for each segment its opening, and then its turns, with turns of the same index in one row.
 * @param {Rollout} left
 * @param {Rollout} right
 * @returns {Row[]}
 */
function rowsOf(left, right) {
  const rows = [];
  for (let index = 0; index < Math.max(left.segments.length, right.segments.length); index++) {
    const [a, b] = [left.segments[index], right.segments[index]];
    rows.push(row(`the opening of segment ${index}`, a && { segment: a, turn: null }, b && { segment: b, turn: null }));
    for (let place = 0; place < Math.max(a?.turns.length ?? 0, b?.turns.length ?? 0); place++) {
      const turn = (a?.turns[place] ?? b.turns[place]).number;
      rows.push(row(`turn ${turn}, in segment ${index}`, cell(a, place), cell(b, place)));
    }
  }
  return rows;
}

/**
 * @param {Segment|undefined} segment
 * @param {number} place
 * @returns {Cell|null}
 */
const cell = (segment, place) => (segment?.turns[place] ? { segment, turn: segment.turns[place] } : null);

/**
 * @param {string} name
 * @param {Cell|null|undefined} left
 * @param {Cell|null|undefined} right
 * @returns {Row}
 */
function row(name, left, right) {
  return { name, left: left ?? null, right: right ?? null, isSame: said(left) === said(right), isHead: !(left ?? right)?.turn };
}

/** @param {Cell|null|undefined} found */
function said(found) {
  if (!found) return "";
  const messages = found.turn ? [found.turn.message, ...found.turn.answers] : found.segment.opening;
  return JSON.stringify(messages, (name, value) => (name === "id" ? undefined : value)); // every call has a different id
}

/**
 * @param {Row} found
 * @param {boolean} isFirst whether this is the first row that differs
 */
function drawRow(found, isFirst) {
  const more = isFirst ? "pair row-pair parting" : found.isSame ? "pair row-pair same" : "pair row-pair";
  return h("div", { class: more, id: isFirst ? "parting" : null }, isFirst && h("p", { class: "parting-line" }, "They diverge here."), drawCell(found.left, found), drawCell(found.right, found));
}

/**
 * @param {Cell|null} found
 * @param {Row} whole
 */
function drawCell(found, whole) {
  if (!found) return h("div", { class: "hint nothing" }, whole.isHead ? "no such segment" : "ended before");
  if (!found.turn) return h("div", null, h("h2", null, `Segment ${found.segment.index}: ${found.segment.kind}`), h("ol", { class: "messages" }, found.segment.opening.map((message) => messageItem(message, ""))));
  return h("div", null, turnFacts(found.segment, found.turn, null), h("ol", { class: "messages" }, messageItem(found.turn.message, ""), found.turn.answers.map((message) => messageItem(message, ""))));
}

// @ts-check
/** All attempts at one task in one step, compared with their baseline. */

import { go, link } from "../core/address.js";
import { get } from "../core/api.js";
import { fill, h, s } from "../core/dom.js";
import { count, difference, duration, many, reward, setting } from "../core/format.js";
import { bind } from "../frame/keyboard.js";
import { empty, title } from "../frame/shell.js";
import { linear, ticks } from "../charts/scale.js";

/** @typedef {import("../core/contract.js").RolloutLine} RolloutLine */

const ROW = 26;
const WIDTH = 520;
/** A number closer to an end of the axis than this is written toward the middle. */
const EDGE = 24;

/** @param {import("../app.js").Page} page */
export async function show(page) {
  const { phase, step, task } = page.query;
  const found = await get(["runs", page.run.run, "groups"], { phase, step, task }, page.signal);
  if (page.signal.aborted) return;
  title(`group of ${task}`, page.run.name);
  if (!found.attempts.length) return fill(page.main, empty("There is no such group in this run.", "Choose a task in the list of tasks, then one of its visits."));
  new GroupPage(page, found).draw();
}

/** The state of the page, including the attempts that are selected for comparison. */
class GroupPage {
  /**
   * @param {import("../app.js").Page} page
   * @param {{attempts: RolloutLine[], baseline: number|null, std: number|null, task_fields: Record<string, any>|null}} found
   */
  constructor(page, found) {
    this.page = page;
    this.run = page.run.run;
    this.found = found;
    this.attempts = [...found.attempts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.number - b.number);
    this.current = 0;
    /** @type {number[]} */
    this.chosen = [];
    this.button = h("button", { type: "button", class: "accent", disabled: true, onclick: () => this.compare() }, "Compare two");
  }

  draw() {
    const { page, found, attempts } = this;
    const failed = attempts.filter((one) => one.reward === null).length;
    const equal = new Set(attempts.filter((one) => one.reward !== null).map((one) => one.reward)).size < 2;
    fill(page.main, h("article", { class: "group" },
      h("header", { class: "rollout-head" }, h("h1", null, page.query.task), h("p", { class: "facts" }, [`${page.query.phase ?? ""}, step ${page.query.step ?? ""}`, many(attempts.length, "attempt"), failed ? `${failed} failed` : "", `baseline ${reward(found.baseline)}`, `spread ${reward(found.std)}`].filter(Boolean).join(" · ")),
        h("span", { class: "grow" }), this.button, h("a", { class: "button", href: link([this.run, "task"], { task: page.query.task }) }, "This task over time")),
      equal && h("p", { class: "note" }, "All rewards are equal: unless turn rewards, branches, a critic or a teacher add a signal, every advantage is 0 and nothing is learned from this group."),
      h("div", { class: "table-scroll" }, this.table()),
      task(found.task_fields)));
    bind({
      "j ArrowDown": { what: "next attempt", run: () => this.point(this.current + 1) },
      "k ArrowUp": { what: "previous attempt", run: () => this.point(this.current - 1) },
      Enter: { what: "open the attempt", run: () => go(link([this.run, "rollout", this.attempts[this.current].number])) },
      c: { what: "compare best and worst, or the two that are ticked", run: () => this.compare() },
      Escape: { what: "back", run: () => history.back() },
    });
    this.point(0);
  }

  table() {
    const { attempts, found } = this;
    const rewards = attempts.flatMap((one) => (one.reward === null ? [] : [one.reward]));
    const values = [...rewards, found.baseline ?? 0, 0];
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = (high - low || 1) * 0.05;
    const x = linear([low - room, high + room], [6, WIDTH - 6]);
    const words = ["", "Rollout", "Reward"];
    const more = ["Advantage", "Stopped by", "Turns", "Tokens", "Time"];
    return h("table", { class: "plain attempts" },
      h("thead", null, h("tr", null, words.map((word) => h("th", { scope: "col" }, word || h("span", { class: "unseen" }, "compare"))), h("th", { scope: "col", class: "axis" }, axis(x, found.baseline)), more.map((word) => h("th", { scope: "col", class: word === "Stopped by" ? "" : "n" }, word)))),
      this.body = h("tbody", null, attempts.map((one, place) => this.row(one, place, x))));
  }

  /**
   * @param {RolloutLine} one
   * @param {number} place
   * @param {import("../charts/scale.js").Scale} x
   */
  row(one, place, x) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${one.rollout_id}`, onchange: () => this.choose(one.number, box) });
    return h("tr", { onclick: () => this.point(place) },
      h("td", null, box),
      h("td", null, h("a", { href: link([this.run, "rollout", one.number]) }, one.rollout_id)),
      h("td", { class: "n" }, one.reward === null ? h("span", { class: "bad", title: one.failure }, "failed") : h("strong", null, reward(one.reward))),
      h("td", { class: "axis" }, bar(one, this.found.baseline, x)),
      h("td", { class: `n ${Number(one.advantage) < 0 ? "lower" : Number(one.advantage) > 0 ? "higher" : ""}` }, difference(one.advantage)),
      h("td", null, one.stop_reason), h("td", { class: "n" }, count(one.turns)), h("td", { class: "n" }, count(one.tokens)), h("td", { class: "n" }, duration(one.seconds)));
  }

  /** @param {number} place */
  point(place) {
    this.current = Math.max(0, Math.min(this.attempts.length - 1, place));
    this.body?.querySelectorAll("tr").forEach((row, at) => row.classList.toggle("current", at === this.current));
    this.body?.children[this.current]?.scrollIntoView({ block: "nearest" });
  }

  /**
   * @param {number} number
   * @param {HTMLInputElement} box
   */
  choose(number, box) {
    this.chosen = box.checked ? [...this.chosen, number] : this.chosen.filter((one) => one !== number);
    this.button.disabled = this.chosen.length !== 2;
  }

  compare() {
    const pair = this.chosen.length === 2 ? this.chosen : [this.attempts[0].number, this.attempts[this.attempts.length - 1].number];
    if (pair[0] !== pair[1]) go(link(["compare", this.run, ...pair]));
  }
}

/**
 * @param {import("../charts/scale.js").Scale} x
 * @param {number|null} baseline
 */
function axis(x, baseline) {
  const marks = ticks(x.domain, 4).map((value) => s("text", { class: "tick", x: x(value), y: 12, "text-anchor": x(value) < EDGE ? "start" : x(value) > WIDTH - EDGE ? "end" : "middle" }, reward(value)));
  const line = baseline === null ? null : [
    s("line", { class: "baseline", x1: x(baseline), x2: x(baseline), y1: 18, y2: 34 }),
    s("text", { class: "tick baseline-name", x: x(baseline), y: 27, dx: x(baseline) > WIDTH / 2 ? -5 : 5, "text-anchor": x(baseline) > WIDTH / 2 ? "end" : "start" }, `baseline ${reward(baseline)}`),
  ];
  return s("svg", { width: WIDTH, height: 34, role: "img", "aria-label": `rewards, with the baseline at ${reward(baseline)}` }, marks, line);
}

/**
 * @param {RolloutLine} one
 * @param {number|null} baseline
 * @param {import("../charts/scale.js").Scale} x
 */
function bar(one, baseline, x) {
  const middle = baseline ?? 0;
  const at = one.reward ?? middle;
  return s("svg", { width: WIDTH, height: ROW, "aria-hidden": "true" },
    s("line", { class: "baseline", x1: x(middle), x2: x(middle), y1: 0, y2: ROW }),
    one.reward !== null && s("rect", { class: at < middle ? "lower-bar" : "higher-bar", x: Math.min(x(at), x(middle)), width: Math.abs(x(at) - x(middle)), y: 9, height: 8 }),
    one.reward !== null && s("circle", { class: at < middle ? "lower-bar" : "higher-bar", cx: x(at), cy: 13, r: 4.5 }));
}

/** @param {Record<string, any>|null} fields */
export function task(fields) {
  if (!fields) return null;
  return h("details", { class: "panel", open: true }, h("summary", null, h("h2", null, "Task, with its answers")),
    h("dl", null, Object.entries(fields).map(([name, value]) => [h("dt", null, name), h("dd", { class: "mono" }, name === "prompt" ? prompt(value) : setting(value))])));
}

/** @param {any} value */
function prompt(value) {
  if (!Array.isArray(value)) return setting(value);
  return value.map((message) => `${message?.role ?? "?"}: ${setting(message?.content)}`).join("\n");
}

// @ts-check
/** One task over the course of training: each attempt's reward, and the mean of each visit. */

import { go, link } from "../core/address.js";
import { get } from "../core/api.js";
import { fill, h, s } from "../core/dom.js";
import { metric, many, reward } from "../core/format.js";
import { bind } from "../frame/keyboard.js";
import { title } from "../frame/shell.js";
import { extent, linear, ticks } from "../charts/scale.js";
import { task as taskFields } from "./group.js";

/** @typedef {{step: number, phase: string, rewards: (number|null)[], numbers: number[]}} Visit */

const HEIGHT = 240;

/** @param {import("../app.js").Page} page */
export async function show(page) {
  const draw = async () => {
    const found = await get(["runs", page.run.run, "task"], { task: page.query.task }, page.signal);
    if (!page.signal.aborted) drawn(page, found);
  };
  title(page.query.task, page.run.name);
  await draw();
  page.onChange((state, before) => before && state.rollouts !== before.rollouts && draw());
  bind({
    a: { what: "all rollouts of this task", run: () => go(link([page.run.run, "rollouts"], { task: page.query.task })) },
    Escape: { what: "back", run: () => history.back() },
  });
}

/**
 * @param {import("../app.js").Page} page
 * @param {{visits: Visit[], task_fields: Record<string, any>|null}} found
 */
function drawn(page, found) {
  const run = page.run.run;
  const attempts = found.visits.reduce((sum, visit) => sum + visit.numbers.length, 0);
  fill(page.main, h("article", { class: "task" },
    h("header", { class: "rollout-head" }, h("h1", null, page.query.task), h("p", { class: "facts" }, `${many(found.visits.length, "visit")} · ${many(attempts, "attempt")} · ${verdict(found.visits)}`), h("span", { class: "grow" }),
      h("a", { class: "button", href: link([run, "rollouts"], { task: page.query.task }) }, "All rollouts of this task")),
    h("figure", { class: "chart wide" }, plot(found.visits, Math.max(480, page.main.clientWidth - 60))),
    h("div", { class: "table-scroll" }, table(run, page.query.task, found.visits)),
    taskFields(found.task_fields)));
}

/** @param {Visit[]} visits */
function verdict(visits) {
  const means = visits.filter((visit) => visit.phase === "train").flatMap((visit) => mean(visit) ?? []);
  if (means.length < 2) return "visited too rarely to tell whether it is learned";
  const gain = means[means.length - 1] - means[0];
  if (Math.abs(gain) < 0.01) return `no change: ${reward(means[0])} at the first visit and at the last`;
  return `${gain > 0 ? "rose" : "fell"} from ${reward(means[0])} to ${reward(means[means.length - 1])}`;
}

/** @param {Visit} visit */
function mean(visit) {
  const scored = visit.rewards.filter((value) => value !== null);
  return scored.length ? scored.reduce((sum, value) => sum + value, 0) / scored.length : null;
}

/**
 * @param {Visit[]} visits
 * @param {number} width
 */
function plot(visits, width) {
  const values = visits.flatMap((visit) => visit.rewards.filter((value) => value !== null));
  const steps = visits.map((visit) => visit.step);
  const x = linear(steps.length ? [Math.min(...steps) - 0.5, Math.max(...steps) + 0.5] : [0, 1], [46, width - 12]);
  const y = linear(extent(values), [HEIGHT - 22, 10]);
  const train = visits.filter((visit) => visit.phase === "train" && mean(visit) !== null);
  const way = train.map((visit, place) => `${place ? "L" : "M"}${x(visit.step).toFixed(1)} ${y(Number(mean(visit))).toFixed(1)}`).join("");
  return s("svg", { class: "plot", width, height: HEIGHT, role: "img", "aria-label": "rewards of all attempts by step; the table below has them" },
    ticks(y.domain, 5).map((value) => [s("line", { class: "grid", x1: 46, x2: width - 12, y1: y(value), y2: y(value) }), s("text", { class: "tick", x: 40, y: y(value) + 3.5, "text-anchor": "end" }, metric(value, 3))]),
    ticks(x.domain, 10).filter(Number.isInteger).map((value) => s("text", { class: "tick", x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, value)),
    s("path", { class: "line run-0", d: way }),
    visits.map((visit) => [
      visit.rewards.map((value, place) => value !== null && s("circle", { class: visit.phase === "train" ? "dot run-0 attempt" : "held run-1", cx: x(visit.step) + spread(place, visit.rewards.length), cy: y(value), r: 3 })),
    ]));
}

/**
 * Returns the horizontal offset of an attempt from its step, so that equal rewards don't cover each other.
 * @param {number} place
 * @param {number} all
 */
const spread = (place, all) => (all < 2 ? 0 : (place / (all - 1) - 0.5) * Math.min(18, all * 2.4));

/**
 * @param {string} run
 * @param {string} task
 * @param {Visit[]} visits
 */
function table(run, task, visits) {
  return h("table", { class: "plain" },
    h("thead", null, h("tr", null, ["Step", "Phase", "Mean", "Attempts"].map((word) => h("th", { scope: "col", class: word === "Mean" ? "n" : "" }, word)))),
    h("tbody", null, visits.map((visit) => h("tr", null,
      h("td", null, h("a", { href: link([run, "group"], { phase: visit.phase, step: visit.step, task }) }, `step ${visit.step}`)),
      h("td", null, visit.phase), h("td", { class: "n" }, reward(mean(visit))),
      h("td", null, h("span", { class: "chips" }, visit.numbers.map((number, place) => h("a", { class: "chip", href: link([run, "rollout", number]), title: `rollout ${number}` }, visit.rewards[place] === null ? "failed" : reward(visit.rewards[place])))))))));
}

// @ts-check
/** The outcome of a rollout: its reward and the reward's parts, its failure, and its metrics. */

import { link } from "../core/address.js";
import { h } from "../core/dom.js";
import { difference, metric, many, reward, setting } from "../core/format.js";
import { icon } from "../frame/icons.js";

/** @typedef {import("../core/contract.js").Rollout} Rollout */

/**
 * Returns the panels next to the conversation.
 * @param {string} run
 * @param {Rollout} rollout
 * @returns {(HTMLElement|null)[]}
 */
export function outcome(run, rollout) {
  return [rewards(run, rollout), cases(rollout), metrics(rollout), task(rollout)];
}

/**
 * @param {string} run
 * @param {Rollout} rollout
 */
function rewards(run, rollout) {
  const parts = Object.entries(rollout.rewards);
  const most = Math.max(1e-9, ...parts.map(([, value]) => Math.abs(value)));
  const advantage = rollout.segments.flatMap((segment) => segment.turns).find((turn) => turn.advantage !== null)?.advantage;
  const others = rollout.neighbors.group.length;
  return h("section", { class: "panel" },
    h("h2", null, "Reward"),
    h("p", { class: "big" }, rollout.reward === null ? h("span", { class: "bad" }, "failed") : reward(rollout.reward),
      advantage !== null && advantage !== undefined && h("span", { class: "beside" }, `advantage ${difference(advantage)}`)),
    parts.length > 0 && h("table", { class: "parts" }, h("tbody", null, parts.map(([name, value]) => part(name, value, most)))),
    Object.keys(rollout.role_rewards).length > 0 && h("table", { class: "parts" }, h("tbody", null, Object.entries(rollout.role_rewards).map(([name, value]) => part(`role ${name}`, value, Math.max(most, Math.abs(value)))))),
    others > 1 && h("p", null, h("a", { href: link([run, "group"], { phase: rollout.phase, step: rollout.step, task: rollout.task }) }, `Group of ${many(others, "attempt")}`)));
}

/**
 * @param {string} name
 * @param {number} value
 * @param {number} most
 */
function part(name, value, most) {
  const bar = h("span", { class: value < 0 ? "part-bar lower" : "part-bar", style: { width: `${(100 * Math.abs(value)) / most}%` } });
  return h("tr", null, h("th", { scope: "row", title: name }, name), h("td", { class: "bar-cell" }, bar), h("td", { class: "n" }, metric(value)));
}

/** @param {Rollout} rollout */
function cases(rollout) {
  const failed = Object.entries(rollout.failed_cases);
  if (!failed.length) return null;
  return h("section", { class: "panel" }, h("h2", null, `${many(failed.length, "case")} not passed`),
    h("dl", null, failed.map(([name, why]) => [h("dt", null, name), h("dd", null, why)])));
}

/** @param {Rollout} rollout */
function metrics(rollout) {
  const rows = Object.entries(rollout.metrics);
  if (rollout.logprob_gap !== null) rows.push(["largest gap, nats", rollout.logprob_gap]);
  return h("section", { class: "panel" }, h("h2", null, "Measured"),
    h("table", { class: "parts" }, h("tbody", null, rows.map(([name, value]) => h("tr", null, h("th", { scope: "row", title: name }, name), h("td", { class: "n" }, metric(value)))))),
    rollout.sandbox && h("p", { class: "sandbox-name", title: rollout.sandbox }, `sandbox ${rollout.sandbox}`));
}

/** @param {Rollout} rollout */
function task(rollout) {
  if (!rollout.task_fields) return null;
  const { prompt, ...fields } = rollout.task_fields;
  return h("details", { class: "panel" }, h("summary", null, h("h2", null, "Task, with its answers")),
    h("dl", null, Object.entries(fields).map(([name, value]) => [h("dt", null, name), h("dd", { class: "mono" }, setting(value))])));
}

/**
 * Returns the failure of a rollout, with the traceback of the user's code.
 * @param {Rollout} rollout
 */
export function failure(rollout) {
  const found = rollout.failure;
  if (!found) return null;
  return h("section", { class: "failure" }, h("h2", null, icon("warning"), ` ${found.type}`), h("p", null, found.message),
    found.where && h("p", { class: "mono" }, `at ${found.where}`),
    found.traceback && h("details", null, h("summary", null, "Traceback"), h("pre", { tabindex: "0", "aria-label": "traceback" }, found.traceback)));
}

/**
 * Returns the suspicious signs of a rollout.
 * @param {Rollout} rollout
 */
export function signs(rollout) {
  if (!rollout.suspicious.length) return null;
  return h("ul", { class: "signs" }, rollout.suspicious.map((sign) => h("li", null, icon("warning"), h("strong", null, sign.name), ` ${sign.why}`)));
}

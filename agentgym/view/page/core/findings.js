// @ts-check
/** Findings in a run's metrics about why its reward does not rise, each with a page to look at. */

/** @typedef {import("./contract.js").MetricsRow} MetricsRow */
/** @typedef {{sentence: string, look: string, page: string, query: Record<string, any>}} Finding */

const LAST = 5;

/**
 * Returns the mean of a metric over the last steps that have it, or null if none has it.
 * @param {MetricsRow[]} rows
 * @param {string} name
 * @param {number} [last]
 * @returns {number|null}
 */
function recent(rows, name, last = LAST) {
  const values = rows.map((row) => row.metrics[name]).filter((value) => value !== null && value !== undefined).slice(-last);
  return values.length ? values.reduce((sum, value) => Number(sum) + Number(value), 0) / values.length : null;
}

/**
 * @param {MetricsRow[]} rows
 * @param {string} name
 * @returns {number}
 */
function total(rows, name) {
  return rows.reduce((sum, row) => sum + (row.metrics[name] ?? 0), 0);
}

/** @param {number} share */
const percent = (share) => `${Math.round(share * 100)}%`;

/** @param {number} value */
const short = (value) => String(Number(value.toPrecision(3)));

/**
 * Returns the findings of a run, the most serious first.
 * @param {MetricsRow[]} all
 * @returns {Finding[]}
 */
export function findings(all) {
  const rows = all.filter((row) => !row.held_out);
  const rules = [noOptimizerSteps, failures, noSignal, toolErrors, mismatch, cutOff, entropy, stale, overfit, malformed];
  return rules.map((rule) => rule(rows, all)).filter((found) => found !== null);
}

/** @typedef {(rows: MetricsRow[], all: MetricsRow[]) => Finding|null} Rule */

/** @type {Rule} */
function noOptimizerSteps(rows) {
  const some = rows.some((row) => "train/optimizer_steps" in row.metrics);
  if (!some || total(rows.slice(-LAST), "train/optimizer_steps") > 0) return null;
  return { sentence: `No optimizer step was taken in the last ${Math.min(LAST, rows.length)} steps, so the policy does not learn.`, look: "Look at the groups", page: "tasks", query: {} };
}

/** @type {Rule} */
function failures(rows) {
  const failed = total(rows, "rollouts/failed");
  const share = failed / Math.max(1, total(rows, "rollouts/finished") + failed);
  if (share < 0.02) return null;
  return { sentence: `${percent(share)} of the rollouts failed and have no reward.`, look: "Read the tracebacks", page: "failures", query: {} };
}

/** @type {Rule} */
function noSignal(rows) {
  const [without, groups] = [recent(rows, "samples/groups_without_signal"), recent(rows, "samples/groups")];
  if (without === null || !groups) return null;
  const all = groups + (without > groups ? without : 0);
  if (without / all < 0.4) return null;
  const none = recent(rows, "groups/solved_by_none") ?? 0;
  const why = none >= (recent(rows, "groups/solved_by_all") ?? 0) ? "mostly because no attempt solves the task" : "mostly because every attempt solves it";
  return { sentence: `${percent(without / all)} of the groups had no training signal recently, ${why}.`, look: "Look at the tasks", page: "tasks", query: { sort: "reward_last", order: none ? "asc" : "desc" } };
}

/** @type {Rule} */
function toolErrors(rows) {
  const names = new Set(rows.flatMap((row) => Object.keys(row.metrics)).filter((name) => /^tools\/.*\/errors$/.test(name)));
  for (const name of names) {
    const share = total(rows, name) / Math.max(1, total(rows, name.replace(/errors$/, "calls")));
    if (share >= 0.2) return { sentence: `${percent(share)} of the calls of the tool ${name.slice(6, -7)} failed.`, look: "Look at those rollouts", page: "rollouts", query: { tool_errors: 1 } };
  }
  return null;
}

/** @type {Rule} */
function mismatch(rows) {
  const [mean, ess] = [recent(rows, "mismatch/mean"), recent(rows, "mismatch/ess")];
  if (mean === null || (mean < 0.05 && (ess ?? 1) > 0.8)) return null;
  return { sentence: `The engine's and the trainer's log-probabilities are ${short(mean)} nats apart on average.`, look: "Look at suspicious rollouts", page: "rollouts", query: { suspicious: 1 } };
}

/** @type {Rule} */
function cutOff(rows) {
  const limits = ["length", "tokens", "context", "turns", "seconds"];
  const found = limits.map((name) => ({ name, share: recent(rows, `stop/${name}`) ?? 0 })).sort((a, b) => b.share - a.share)[0];
  if (!found || found.share < 0.3) return null;
  return { sentence: `${percent(found.share)} of the rollouts recently ended at a limit (${found.name}).`, look: "Look at those rollouts", page: "rollouts", query: { stop: found.name, order: "desc" } };
}

/** @type {Rule} */
function entropy(rows) {
  const first = rows.find((row) => row.metrics["train/entropy"])?.metrics["train/entropy"];
  const now = recent(rows, "train/entropy");
  if (!first || now === null || rows.length < LAST || now > first * 0.1) return null;
  return { sentence: `The entropy fell from ${short(first)} to ${short(now)} nats: the policy explores little.`, look: "Compare rollouts of one group", page: "tasks", query: {} };
}

/** @type {Rule} */
function stale(rows) {
  const age = recent(rows, "staleness/mean");
  if (age === null || age < 2) return null;
  return { sentence: `Groups are ${short(age)} policy versions old on average when they are trained on.`, look: "Look at the settings", page: "settings", query: {} };
}

/** @type {Rule} */
function overfit(rows, all) {
  const held = all.filter((row) => row.held_out && typeof row.metrics["eval/reward"] === "number").map((row) => Number(row.metrics["eval/reward"]));
  const [first, last, now] = [held[0], held[held.length - 1], recent(rows, "reward")];
  const before = rows.find((row) => row.metrics.reward !== undefined)?.metrics.reward;
  if (held.length < 2 || now === null || before === null || before === undefined || last > first || now <= before + 0.1) return null;
  return { sentence: `The reward rose from ${short(before)} to ${short(now)} in training, but not on held-out tasks (${short(first)} to ${short(last)}).`, look: "Read the best rollouts", page: "rollouts", query: { sort: "reward", order: "desc" } };
}

/** @type {Rule} */
function malformed(rows) {
  const [bad, calls] = [recent(rows, "rollout/malformed_calls"), recent(rows, "rollout/tool_calls")];
  if (bad === null || bad < 0.2 * Math.max(1, (calls ?? 0) + bad)) return null;
  return { sentence: `A rollout has ${short(bad)} malformed tool calls on average, which don't reach any tool.`, look: "Look at the worst rollouts", page: "rollouts", query: { sort: "reward", order: "asc" } };
}

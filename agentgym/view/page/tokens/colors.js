// @ts-check
/** The measures that a token's color can show: its mask, log-probability, ratio, advantage or policy version. */

import { difference, metric } from "../core/format.js";

/**
 * @typedef {object} Token
 * @property {number} index
 * @property {number} id
 * @property {string} text
 * @property {boolean} sampled
 * @property {boolean|null} trained null if it is unknown
 * @property {number|null} logprob
 * @property {number|null} ratio
 * @property {number|null} advantage
 * @property {number|null} version
 * @property {number|null} turn
 */

/** @typedef {{most: number, versions: number[]}} Range the largest advantage, and all versions, of the rollout */
/** @typedef {{name: string, words: string, help: string, color: (token: Token, range: Range) => string, legend: (range: Range) => [string, string][]}} Measure */

const LOGPROBS = [-0.05, -0.25, -0.7, -1.6, -3, -5];
const RATIOS = [0.5, 0.8, 0.95, 1.05, 1.25, 2];

/**
 * @param {number} value
 * @param {number[]} edges in ascending order
 */
const above = (value, edges) => edges.filter((edge) => value >= edge).length;

/** @type {Measure[]} */
export const MEASURES = [
  {
    name: "mask",
    words: "Mask",
    help: "which tokens the policy sampled, and which of them were trained on",
    color: () => "",
    legend: () => [["trained", "sampled and trained"], ["sampled", "sampled, untrained or unknown"], ["", "context: prompt, tools, env"]],
  },
  {
    name: "logprob",
    words: "Log-prob",
    help: "log-probability under the engine when it was sampled, in nats: the darker, the more surprising",
    color: (token) => (token.logprob === null ? "" : `lp-${6 - above(token.logprob, [...LOGPROBS].reverse())}`),
    legend: () => [["lp-0", "above −0.05"], ...LOGPROBS.slice(1).map((edge, place) => /** @type {[string, string]} */ ([`lp-${place + 1}`, `to ${metric(edge)}`])), ["lp-6", "below −5"]],
  },
  {
    name: "ratio",
    words: "Ratio",
    help: "probability under the trainer over that under the engine; 1 if both agree",
    color: (token) => (token.ratio === null ? "" : `d-${above(token.ratio, RATIOS)}`),
    legend: () => [["d-0", "below 0.5"], ["d-1", "to 0.8"], ["d-2", "to 0.95"], ["d-3", "about 1"], ["d-4", "to 1.25"], ["d-5", "to 2"], ["d-6", "above 2"]],
  },
  {
    name: "advantage",
    words: "Advantage",
    help: "how much better than the baseline it was: the weight of the token in the loss",
    color: (token, range) => (token.advantage === null ? "" : `d-${level(token.advantage, range.most)}`),
    legend: ({ most }) => (most ? [["d-0", difference(-most)], ["d-2", "below 0"], ["d-3", "0"], ["d-4", "above 0"], ["d-6", difference(most)]] : [["d-3", "0: no signal"]]),
  },
  {
    name: "version",
    words: "Version",
    help: "the policy version that sampled the token",
    color: (token, range) => (token.version === null ? "" : `v-${Math.max(0, range.versions.indexOf(token.version)) % 6}`),
    legend: ({ versions }) => versions.map((version, place) => /** @type {[string, string]} */ ([`v-${place % 6}`, `version ${version}`])),
  },
];

/**
 * Returns one of seven levels around 0; level 3 is 0 itself.
 * @param {number} value
 * @param {number} most
 */
function level(value, most) {
  if (!value || !most) return 3;
  const size = Math.min(3, Math.max(1, Math.ceil((Math.abs(value) / most) * 3 - 1e-9)));
  return value < 0 ? 3 - size : 3 + size;
}

/**
 * Returns the CSS classes of a token: always its mask, and the color of the measure.
 * @param {Token} token
 * @param {Measure} measure
 * @param {Range} range
 */
export function classes(token, measure, range) {
  const mask = token.trained ? "t trained" : token.sampled ? "t sampled" : "t";
  const color = measure.color(token, range);
  return measure.name === "mask" ? mask : `${mask} measured ${color}`.trimEnd();
}

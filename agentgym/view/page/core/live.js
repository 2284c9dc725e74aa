// @ts-check
/** The state of active runs, requested every two seconds while the page is visible. */

import { get } from "./api.js";

/** @typedef {import("./contract.js").State} State */

const EVERY_MS = 2000;

/**
 * Calls `changed` whenever the run has more rollouts or metrics than before, until the signal aborts or the run ends.
 * @param {string} run
 * @param {(state: State, before: State|null) => void} changed
 * @param {AbortSignal} signal
 */
export async function follow(run, changed, signal) {
  /** @type {State|null} */
  let before = null;
  while (!signal.aborted) {
    if (!document.hidden) {
      const state = await stateOf(run, signal);
      if (signal.aborted) return;
      if (state && differs(state, before)) {
        changed(state, before);
        before = state;
      }
      if (state && !state.live) return;
    }
    await pause(EVERY_MS, signal);
  }
}

/**
 * @param {string} run
 * @param {AbortSignal} signal
 * @returns {Promise<State|null>} null if the server did not respond this time
 */
async function stateOf(run, signal) {
  try {
    return await get(["runs", run, "state"], {}, signal);
  } catch {
    return null;
  }
}

/**
 * @param {State} now
 * @param {State|null} before
 */
function differs(now, before) {
  return !before || now.rollouts !== before.rollouts || now.lines !== before.lines || now.live !== before.live || now.indexed !== before.indexed;
}

/**
 * Waits for this time, or until the signal aborts.
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
export function pause(milliseconds, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
}

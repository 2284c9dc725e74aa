// @ts-check
/** Formats numbers, times and sizes: short, aligned, and without false precision. */

const WHOLE = new Intl.NumberFormat("en");
const NONE = "–";

/** @param {number|null|undefined} value */
const absent = (value) => value === null || value === undefined || Number.isNaN(value);

/**
 * Formats an integer with commas.
 * @param {number|null|undefined} value
 */
export function count(value) {
  return absent(value) ? NONE : WHOLE.format(Math.round(Number(value)));
}

/**
 * Formats a number with about `digits` significant digits, and very large and very small ones with powers of ten.
 * @param {number|null|undefined} value
 * @param {number} [digits]
 * @returns {string}
 */
export function metric(value, digits = 4) {
  if (absent(value)) return NONE;
  const number = Number(value);
  const size = Math.abs(number);
  if (number === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return number.toExponential(Math.min(2, digits - 1)).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  if (Number.isInteger(number)) return signed(WHOLE.format(number));
  return signed(String(Number(number.toPrecision(digits))));
}

/** @param {string} text a number; the hyphen becomes a minus sign, which is as wide as a plus */
const signed = (text) => text.replace("-", "−");

/**
 * Formats a number that always has a sign, such as an advantage.
 * @param {number|null|undefined} value
 */
export function difference(value) {
  if (absent(value)) return NONE;
  const text = metric(value, 3);
  return Number(value) > 0 ? `+${text}` : text;
}

/**
 * Formats a reward with at most three decimals.
 * @param {number|null|undefined} value
 */
export function reward(value) {
  if (absent(value)) return NONE;
  const number = Number(value);
  return Math.abs(number) >= 1e5 ? metric(number, 4) : signed(String(Number(number.toFixed(3))));
}

/**
 * Formats seconds as a duration.
 * @param {number|null|undefined} value
 */
export function duration(value) {
  if (absent(value)) return NONE;
  const seconds = Number(value);
  if (seconds === 0) return "0 s";
  if (Math.abs(seconds) < 0.001) return `${metric(seconds * 1e6, 2)} µs`;
  if (Math.abs(seconds) < 1) return `${metric(seconds * 1000, 3)} ms`;
  if (seconds < 100) return `${metric(seconds, 3)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/**
 * Formats a share as a percentage.
 * @param {number|null|undefined} value between 0 and 1
 */
export function percent(value) {
  if (absent(value)) return NONE;
  const share = Number(value) * 100;
  return share > 0 && share < 0.1 ? "below 0.1%" : `${Number(share.toPrecision(3))}%`;
}

/**
 * Formats a time in the reader's time zone.
 * @param {number|null|undefined} epoch seconds since 1970
 */
export function moment(epoch) {
  if (absent(epoch)) return NONE;
  const date = new Date(Number(epoch) * 1000);
  const two = (/** @type {number} */ value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/**
 * Returns a count with its noun, such as "1 turn" and "2 turns".
 * @param {number} value
 * @param {string} word
 * @param {string} [plural]
 */
export function many(value, word, plural) {
  return `${count(value)} ${value === 1 ? word : (plural ?? `${word}s`)}`;
}

/**
 * Formats a setting's value as one line of text.
 * @param {any} value
 */
export function setting(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "string") return value;
  return JSON.stringify(value) ?? String(value);
}

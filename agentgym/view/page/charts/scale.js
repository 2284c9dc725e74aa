// @ts-check
/** Scales and their ticks. */

/** Values that differ by no more than this share count as equal. */
const ALIKE = 1e-12;

/** @typedef {{(value: number): number, domain: [number, number], invert: (place: number) => number}} Scale */

/**
 * Returns a linear scale from `domain` to `range`.
 * @param {[number, number]} domain
 * @param {[number, number]} range
 * @returns {Scale}
 */
export function linear(domain, range) {
  const [low, high] = domain;
  const [from, to] = range;
  // Halves: the difference of two very large numbers would be infinite.
  const span = high / 2 - low / 2 || 0.5;
  const scale = (/** @type {number} */ value) => from + ((value / 2 - low / 2) / span) * (to - from);
  return Object.assign(scale, { domain, invert: (/** @type {number} */ place) => low + ((place - from) / (to - from || 1)) * span * 2 });
}

/**
 * Returns a logarithmic scale; the domain must be above 0.
 * @param {[number, number]} domain
 * @param {[number, number]} range
 * @returns {Scale}
 */
export function logarithmic(domain, range) {
  const inner = linear([Math.log10(domain[0]), Math.log10(domain[1])], range);
  const scale = (/** @type {number} */ value) => inner(Math.log10(Math.max(value, domain[0] / 10)));
  return Object.assign(scale, { domain, invert: (/** @type {number} */ place) => 10 ** inner.invert(place) });
}

/**
 * Returns round numbers that divide a domain into about `wanted` parts.
 * @param {[number, number]} domain
 * @param {number} wanted
 * @returns {number[]}
 */
export function ticks([low, high], wanted) {
  if (!(high > low)) return [low];
  const rough = high / wanted - low / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? 10 * power;
  const first = Math.ceil(low / step);
  const found = Array.from({ length: Math.ceil(wanted) + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
  return [...new Set(found.filter((value) => value <= high + step * 1e-9))];
}

/**
 * Returns the powers of ten within a domain, thinned to at most five.
 * @param {[number, number]} domain
 * @returns {number[]}
 */
export function powers([low, high]) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const stride = Math.max(1, Math.ceil((last - first + 1) / 5));
  const found = [];
  for (let power = first; power <= last; power += stride) found.push(10 ** power);
  return found.length ? found : [low];
}

/**
 * Returns a domain slightly wider than the values; a single value, or values that only differ by rounding, are in its middle.
 * @param {number[]} values
 * @returns {[number, number]}
 */
export function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high / 2 - low / 2 <= size * ALIKE) return [within(low - (size * 0.1 || 0.5)), within(high + (size * 0.1 || 0.5))];
  const room = high * 0.06 - low * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : within(low - room), within(high + room)];
}

/** @param {number} value a value that a sum may have made infinite */
const within = (value) => Math.max(-Number.MAX_VALUE, Math.min(Number.MAX_VALUE, value));

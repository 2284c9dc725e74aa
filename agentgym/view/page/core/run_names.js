// @ts-check
/** Shortened names of runs: words that all names begin with are cut, so that the differences stay visible. */

/** Maximum length of a name that is not cut. */
const LONGEST = 24;

/**
 * Returns the displayed names by the full names.
 * @param {string[]} names
 * @returns {Map<string, string>}
 */
export function shortNames(names) {
  const different = [...new Set(names)].sort();
  const cut = different.length > 1 ? wordsOf(commonBegin(different[0], different[different.length - 1])) : 0;
  return new Map(different.map((name) => [name, cut > 1 && name.length > LONGEST ? `…${name.slice(cut)}` : name]));
}

/**
 * Returns the common prefix of two names, which all names sorted between them share.
 * @param {string} first
 * @param {string} last
 */
function commonBegin(first, last) {
  let length = 0;
  while (length < first.length && first[length] === last[length]) length++;
  return first.slice(0, length);
}

/**
 * Returns where the last whole word of the common prefix starts, which names the part that differs.
 * @param {string} common
 */
const wordsOf = (common) => common.search(/[^-_/. ]+[-_/. ]*[^-_/. ]*$/);

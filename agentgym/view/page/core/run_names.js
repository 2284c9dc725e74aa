// @ts-check
/** Names of runs as they fit: the words that all of them begin with are cut, so that what tells them apart is seen. */

/** Characters of a name that is not cut. */
const LONGEST = 24;

/**
 * The names as they are shown, by the whole ones.
 * @param {string[]} names
 * @returns {Map<string, string>}
 */
export function shortNames(names) {
  const different = [...new Set(names)].sort();
  const cut = different.length > 1 ? wordsOf(commonBegin(different[0], different[different.length - 1])) : 0;
  return new Map(different.map((name) => [name, cut > 1 && name.length > LONGEST ? `…${name.slice(cut)}` : name]));
}

/**
 * What two names begin with, which is what all names between them begin with.
 * @param {string} first
 * @param {string} last
 */
function commonBegin(first, last) {
  let length = 0;
  while (length < first.length && first[length] === last[length]) length++;
  return first.slice(0, length);
}

/**
 * Where the last whole word of what is common begins, which says what the difference is of.
 * @param {string} common
 */
const wordsOf = (common) => common.search(/[^-_/. ]+[-_/. ]*[^-_/. ]*$/);

// @ts-check
/** The address of a page: which run, which page, and every filter, so that a link shows another person the same. */

/** @typedef {{path: string[], query: Record<string, string>}} Address */

/**
 * Reads an address such as "#/RUN/rollouts?failed=1".
 * @param {string} hash
 * @returns {Address}
 */
export function parse(hash) {
  const [path = "", query = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
  return { path: path.split("/").filter(Boolean).map(decoded), query: Object.fromEntries(new URLSearchParams(query)) };
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** @returns {Address} the address that the browser shows */
export function current() {
  return parse(location.hash);
}

/**
 * Makes a link; values that are empty, null or false are left out.
 * @param {(string|number)[]} path
 * @param {Record<string, any>} [query]
 * @returns {string}
 */
export function link(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  const search = new URLSearchParams(kept.map(([name, value]) => [name, value === true ? "1" : String(value)])).toString();
  return `#/${path.map((part) => encodeURIComponent(String(part))).join("/")}${search ? `?${search}` : ""}`;
}

/**
 * Goes to another page.
 * @param {string} href
 */
export function go(href) {
  location.hash = href.slice(1);
}

/**
 * Writes the filters of the page that is open into its address, without opening it again.
 * @param {Record<string, any>} query all of its filters
 */
export function keep(query) {
  history.replaceState(history.state, "", link(current().path, query));
}

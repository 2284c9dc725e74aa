// @ts-check
/** The address of a page: its run, its name and every filter, so that a link shows the same page to other people. */

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

/** @returns {Address} the current address of the browser */
export function current() {
  return parse(location.hash);
}

/**
 * Returns a link; empty, null and false values are left out.
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
 * Navigates to another page.
 * @param {string} href
 */
export function go(href) {
  location.hash = href.slice(1);
}

/**
 * Writes the filters of the open page into its address, without reopening the page.
 * @param {Record<string, any>} query all filters of the page
 */
export function keep(query) {
  history.replaceState(history.state, "", link(current().path, query));
}

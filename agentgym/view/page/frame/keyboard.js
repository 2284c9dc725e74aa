// @ts-check
/** Keyboard shortcuts of every page and of the open page, and the help that lists both. */

import { h } from "../core/dom.js";

/** @typedef {{what: string, run: () => void}} Key */

/** @type {Map<string, Key>} */
const always = new Map();
/** @type {Map<string, Key>} */
let ofPage = new Map();

const WRITTEN = new Map([["ArrowDown", "↓"], ["ArrowUp", "↑"], ["ArrowLeft", "←"], ["ArrowRight", "→"], ["Escape", "Esc"]]);

/**
 * Binds keys for every page; a name such as "j ArrowDown" binds two keys to one action.
 * @param {Record<string, Key>} keys
 */
export function bindAlways(keys) {
  put(always, keys);
}

/** Removes the keys of the page that was open. */
export function clearPageKeys() {
  ofPage = new Map();
}

/**
 * Binds keys for the open page.
 * @param {Record<string, Key>} keys
 */
export function bind(keys) {
  put(ofPage, keys);
}

/**
 * @param {Map<string, Key>} map
 * @param {Record<string, Key>} keys
 */
function put(map, keys) {
  for (const [names, key] of Object.entries(keys)) for (const name of names.split(" ")) map.set(name, key);
}

/** Starts listening for keys. */
export function listen() {
  document.addEventListener("keydown", pressed);
}

/** @param {KeyboardEvent} event */
function pressed(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = /** @type {HTMLElement} */ (event.target);
  if (isWriting(target)) {
    if (event.key === "Escape") {
      event.preventDefault(); // otherwise Escape would clear a search field without removing its filter
      target.blur();
    }
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && target.closest("a, button, summary, select, input")) return;
  const key = ofPage.get(event.key) ?? always.get(event.key);
  if (!key) return;
  event.preventDefault();
  key.run();
}

/** @param {HTMLElement} target */
function isWriting(target) {
  const field = target.closest("input, select, textarea");
  return field !== null && !["checkbox", "radio", "range", "button"].includes(field.getAttribute("type") ?? "text");
}

/** Shows all keys that work now. */
export function showHelp() {
  const dialog = h("dialog", { class: "help", "aria-labelledby": "help-title" });
  const close = h("button", { class: "quiet", type: "button", onclick: () => dialog.close() }, "Close");
  dialog.append(h("header", null, h("h2", { id: "help-title" }, "Keyboard"), close));
  if (ofPage.size) dialog.append(h("h3", null, "On this page"), table(ofPage));
  dialog.append(h("h3", null, "Everywhere"), table(always));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {Map<string, Key>} map */
function table(map) {
  /** @type {Map<Key, string[]>} */
  const rows = new Map();
  for (const [name, key] of map) rows.set(key, [...(rows.get(key) ?? []), WRITTEN.get(name) ?? name]);
  const lines = [...rows].map(([key, names]) => {
    const caps = names.flatMap((name, place) => [place ? " or " : "", h("kbd", null, name)]);
    return h("tr", null, h("th", { scope: "row" }, caps), h("td", null, key.what));
  });
  return h("table", { class: "keys" }, h("tbody", null, lines));
}

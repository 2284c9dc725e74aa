// @ts-check
/** Elements made without markup: a string becomes a text node, and what is hidden in it becomes a visible mark. */

import { spelled, visible } from "./visible_text.js";

/** @typedef {Node|string|number|null|undefined|false|Child[]} Child */
/** @typedef {Record<string, any>} Props */

const SVG = "http://www.w3.org/2000/svg";
/** Attributes that the browser shows as plain text. */
const SHOWN = new Set(["title", "aria-label", "placeholder", "alt", "label"]);

/**
 * Makes an HTML element. Props whose name starts with "on" are listeners, "style" is a record of CSS properties.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Props|null} [props]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  set(element, props ?? {});
  add(element, children);
  return element;
}

/**
 * Makes an SVG element in the same way.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag
 * @param {Props|null} [props]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function s(tag, props, ...children) {
  const element = /** @type {SVGElementTagNameMap[T]} */ (document.createElementNS(SVG, tag));
  set(element, props ?? {});
  add(element, children);
  return element;
}

/**
 * Adds children to a parent; false, null and undefined are left out.
 * @param {Node} parent
 * @param {Child} child
 */
export function add(parent, child) {
  if (Array.isArray(child)) for (const one of child) add(parent, one);
  else if (child instanceof Node) parent.appendChild(child);
  else if (child !== null && child !== undefined && child !== false) parent.appendChild(visible(String(child)));
}

/**
 * Replaces all that an element holds.
 * @param {Element} parent
 * @param {...Child} children
 */
export function fill(parent, ...children) {
  parent.replaceChildren();
  add(parent, children);
}

/**
 * @param {Element} element
 * @param {Props} props
 */
function set(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") styled(/** @type {HTMLElement} */ (element), value);
    else element.setAttribute(name, checked(name, value === true ? "" : String(value)));
  }
}

/**
 * Sets CSS properties one by one, as the content security policy lets scripts do.
 * @param {HTMLElement|SVGElement} element
 * @param {Record<string, string|number>} properties
 */
export function styled(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, String(value));
}

/**
 * Refuses a link that leaves the page, and spells out what would be invisible.
 * @param {string} name
 * @param {string} value
 */
function checked(name, value) {
  if (name === "href" && !value.startsWith("#")) throw new Error(`href: links must stay within the page, got ${value}`);
  if (name === "src" && !value.startsWith("data:image/")) throw new Error("src: only images from the store are allowed");
  return SHOWN.has(name) ? spelled(value) : value;
}

/**
 * The element with this id; an error where the page has none.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/**
 * Says a sentence to screen readers.
 * @param {string} sentence
 */
export function say(sentence) {
  byId("said").textContent = spelled(sentence);
}

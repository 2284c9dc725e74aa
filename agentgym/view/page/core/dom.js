// @ts-check
/** Creates elements without parsing markup: a string becomes a text node, with hidden characters as visible marks. */

import { spelled, visible } from "./visible_text.js";

/** @typedef {Node|string|number|null|undefined|false|Child[]} Child */
/** @typedef {Record<string, any>} Props */

const SVG = "http://www.w3.org/2000/svg";
/** Attributes that the browser shows as plain text. */
const SHOWN = new Set(["title", "aria-label", "placeholder", "alt", "label"]);

/**
 * Creates an HTML element. Props whose names start with "on" are listeners; "style" is a record of CSS properties.
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
 * Creates an SVG element in the same way.
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
 * Replaces the children of an element.
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
 * Sets CSS properties one by one, because the content security policy allows scripts nothing else.
 * @param {HTMLElement|SVGElement} element
 * @param {Record<string, string|number>} properties
 */
export function styled(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, String(value));
}

/**
 * Refuses links that leave the page, and spells out invisible characters.
 * @param {string} name
 * @param {string} value
 */
function checked(name, value) {
  if (name === "href" && !value.startsWith("#")) throw new Error(`href: links must stay within the page, got ${value}`);
  if (name === "src" && !value.startsWith("data:image/")) throw new Error("src: only images from the store are allowed");
  return SHOWN.has(name) ? spelled(value) : value;
}

/**
 * Returns the element with this id; throws an error if there is none.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/**
 * Announces a sentence to screen readers.
 * @param {string} sentence
 */
export function say(sentence) {
  byId("said").textContent = spelled(sentence);
}

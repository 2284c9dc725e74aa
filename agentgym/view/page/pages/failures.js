// @ts-check
/** To come. */
import { fill, h } from "../core/dom.js";
/** @param {import("../app.js").Page} page */
export async function show(page) { fill(page.main, h("h1", null, "to come")); }

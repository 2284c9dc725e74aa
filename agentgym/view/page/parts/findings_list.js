// @ts-check
/** The findings of one run as a list of links. */

import { link } from "../core/address.js";
import { h } from "../core/dom.js";
import { findings } from "../core/findings.js";

/**
 * Returns the findings, or a sentence that there are none.
 * @param {string} run
 * @param {import("../core/contract.js").MetricsRow[]} rows
 */
export function findingsOf(run, rows) {
  const found = findings(rows);
  const items = found.map((one) => h("li", null, one.sentence, " ", h("a", { href: link([run, one.page], one.query) }, `${one.look}`)));
  return h("section", { class: "findings", "aria-label": "What the metrics say" }, h("h2", null, "What the metrics say"),
    found.length ? h("ul", null, items) : h("p", { class: "hint" }, rows.length ? "Nothing in the metrics looks wrong." : "No step has finished yet."));
}

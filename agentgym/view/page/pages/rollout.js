// @ts-check
/** One rollout: its segments on the left, and its messages, tokens and times on the right. */

import { go, keep, link } from "../core/address.js";
import { get } from "../core/api.js";
import { fill, h, say } from "../core/dom.js";
import { count, duration, many } from "../core/format.js";
import { icon } from "../frame/icons.js";
import { bind } from "../frame/keyboard.js";
import { empty, title } from "../frame/shell.js";
import { placeOf, remember, tableOf } from "../frame/trail.js";
import { conversation } from "../rollout/messages.js";
import { failure, outcome, signs } from "../rollout/outcome.js";
import { segmentTree } from "../rollout/segment_tree.js";
import { waterfall } from "../rollout/waterfall.js";
import { TokenView } from "../tokens/token_view.js";

/** @typedef {import("../core/contract.js").Rollout} Rollout */

const VIEWS = [
  { name: "messages", words: "Messages", key: "m" },
  { name: "tokens", words: "Tokens", key: "t" },
  { name: "timeline", words: "Time", key: "w" },
  { name: "raw", words: "Raw", key: "r" },
];

/** @param {import("../app.js").Page} page */
export async function show(page) {
  const number = Number(page.path[0]);
  const rollout = await get(["runs", page.run.run, "rollouts", number], {}, page.signal);
  if (page.signal.aborted) return;
  title(rollout.rollout_id, page.run.name);
  const shown = new RolloutPage(page, rollout);
  shown.draw();
  return shown.at !== null;
}

/** The state of the page: the displayed segment, and the view of it. */
class RolloutPage {
  /**
   * @param {import("../app.js").Page} page
   * @param {Rollout} rollout
   */
  constructor(page, rollout) {
    this.page = page;
    this.rollout = rollout;
    this.run = page.run.run;
    const wanted = Number(page.query.segment ?? 0);
    this.segment = Number.isInteger(wanted) && wanted >= 0 && wanted < rollout.segments.length ? wanted : 0;
    this.view = VIEWS.some((view) => view.name === page.query.view) ? page.query.view : "messages";
    this.color = page.query.color ?? "mask";
    this.at = page.query.at === undefined ? null : Number(page.query.at);
    this.tree = h("div");
    this.views = h("div", { class: "views" });
    this.content = h("div", { class: "view" });
    /** Stops the previous view's work. */
    this.ending = new AbortController();
    page.signal.addEventListener("abort", () => this.ending.abort());
  }

  draw() {
    const { rollout } = this;
    fill(this.page.main, h("article", { class: "rollout" },
      this.head(), signs(rollout), failure(rollout),
      h("div", { class: "rollout-columns" },
        h("aside", { class: "rollout-side", "aria-label": "Outcome and segments" }, this.tree, outcome(this.run, rollout)),
        h("div", { class: "rollout-main" }, this.views, this.content))));
    this.keys();
    this.redraw();
  }

  head() {
    const { rollout } = this;
    const { previous, next } = rollout.neighbors;
    const place = placeOf(this.run, rollout.number);
    /** @param {boolean} inBranches */
    const turns = (inBranches) => rollout.segments.reduce((sum, segment) => sum + ((segment.branch !== null) === inBranches ? segment.turns.length : 0), 0);
    const beside = turns(true) ? `, and ${count(turns(true))} in branches` : "";
    const sampled = rollout.segments.reduce((sum, segment) => sum + segment.sampled, 0);
    const facts = [`#${rollout.number}`, `${rollout.phase}, step ${rollout.step}`, rollout.env, `stopped by ${rollout.stop_reason}`, many(turns(false), "turn") + beside, `${count(sampled)} tokens sampled`, duration(rollout.metrics.seconds ?? null)];
    return h("header", { class: "rollout-head" },
      h("h1", null, rollout.rollout_id),
      h("p", { class: "facts" }, facts.filter((fact) => fact && fact !== "–").join(" · ")),
      h("span", { class: "grow" }),
      h("a", { class: "button", href: tableOf(this.run) }, place ? `${count(place.index + 1)} of ${count(place.total)} in the table` : "All rollouts"),
      this.arrow("previous", "Previous rollout (k)", place ? place.index > 0 : previous !== null, -1),
      this.arrow("next", "Next rollout (j)", place ? place.index < place.total - 1 : next !== null, 1));
  }

  /**
   * @param {string} name
   * @param {string} words
   * @param {boolean} isThere
   * @param {number} by
   */
  arrow(name, words, isThere, by) {
    return h("button", { type: "button", title: words, "aria-label": words, disabled: !isThere, onclick: () => this.beside(by) }, icon(name));
  }

  redraw() {
    this.ending.abort();
    this.ending = new AbortController();
    const query = { segment: this.segment || null, view: this.view === "messages" ? null : this.view, color: this.view === "tokens" && this.color !== "mask" ? this.color : null, at: this.at };
    keep(query);
    fill(this.views, h("nav", { class: "tabs", "aria-label": "Views" }, VIEWS.map((view) => this.tab(view))));
    if (!this.rollout.segments.length) return fill(this.content, empty("This rollout has no segments: it failed before the first request to the model.", "Read the traceback above."));
    fill(this.tree, segmentTree(this.rollout.segments, this.segment, (segment) => this.href(segment, this.view), (segment) => this.open(segment, this.view)));
    this.drawView();
  }

  /** @param {{name: string, words: string, key: string}} view */
  tab(view) {
    return h("a", { href: this.href(this.segment, view.name), "aria-current": view.name === this.view ? "true" : null, title: `${view.words} (${view.key})`, onclick: (/** @type {MouseEvent} */ event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      this.open(this.segment, view.name);
    } }, view.words);
  }

  drawView() {
    const segment = this.rollout.segments[this.segment];
    if (this.view === "tokens") return this.drawTokens(segment);
    this.tokens = null;
    if (this.view === "timeline") return fill(this.content, waterfall(this.rollout.timeline, this.rollout.exact === true, Math.max(480, this.content.clientWidth)));
    if (this.view === "raw") return fill(this.content, raw(segment));
    fill(this.content, conversation(this.rollout.segments, this.segment, { href: (to, view, at) => this.href(to, view, at), open: (to, view, at) => this.open(to, view, at) }));
  }

  /** @param {import("../core/contract.js").Segment} segment */
  drawTokens(segment) {
    const view = new TokenView({ run: this.run, rollout: this.rollout, segment, color: this.color, signal: this.ending.signal, onColor: (color) => {
      this.color = color;
      keep({ segment: this.segment || null, view: "tokens", color: color === "mask" ? null : color, at: this.at });
    } });
    this.tokens = view;
    fill(this.content, view.element);
    if (this.at !== null) view.go(this.at);
    else view.showPlace();
  }

  /**
   * @param {number} segment
   * @param {string} view
   * @param {number} [at]
   */
  href(segment, view, at) {
    return link([this.run, "rollout", this.rollout.number], { segment: segment || null, view: view === "messages" ? null : view, at: at ?? null });
  }

  /**
   * @param {number} segment
   * @param {string} view
   * @param {number} [at]
   */
  open(segment, view, at) {
    this.segment = Math.max(0, Math.min(this.rollout.segments.length - 1, segment));
    this.view = view;
    this.at = at ?? null;
    this.redraw();
    if (at === undefined) window.scrollTo({ top: 0 });
    say(`segment ${this.segment}, ${view}`);
  }

  /**
   * Opens the previous or next rollout: in the table from which this one was opened, otherwise in the order of writing.
   * @param {number} by
   */
  async beside(by) {
    const place = placeOf(this.run, this.rollout.number);
    const { previous, next } = this.rollout.neighbors;
    let number = by < 0 ? previous : next;
    if (place) {
      const index = place.index + by;
      if (index < 0 || index >= place.total) return;
      const { rows } = await get(["runs", this.run, "rollouts"], { ...place.query, offset: index, limit: 1 }, this.page.signal);
      if (!rows.length) return;
      number = rows[0].number;
      remember({ ...place, index, number: rows[0].number });
    }
    if (number !== null) go(link([this.run, "rollout", number], { view: this.view === "messages" ? null : this.view, color: this.view === "tokens" && this.color !== "mask" ? this.color : null }));
  }

  compare() {
    const other = this.rollout.neighbors.group.find((number) => number !== this.rollout.number);
    if (other !== undefined) go(link(["compare", this.run, this.rollout.number, other]));
    else say("There is no other rollout in this group.");
  }

  keys() {
    const { rollout } = this;
    const group = { phase: rollout.phase, step: rollout.step, task: rollout.task };
    bind({
      "j ArrowDown": { what: "next rollout", run: () => this.beside(1) },
      "k ArrowUp": { what: "previous rollout", run: () => this.beside(-1) },
      "]": { what: "next segment", run: () => this.open(this.segment + 1, this.view) },
      "[": { what: "previous segment", run: () => this.open(this.segment - 1, this.view) },
      m: { what: "messages", run: () => this.open(this.segment, "messages") },
      t: { what: "tokens", run: () => this.open(this.segment, "tokens") },
      w: { what: "time (waterfall)", run: () => this.open(this.segment, "timeline") },
      r: { what: "raw", run: () => this.open(this.segment, "raw") },
      n: { what: "next token coloring", run: () => this.tokens?.chooseNext() },
      g: { what: "the group", run: () => go(link([this.run, "group"], group)) },
      c: { what: "compare with another rollout of the group", run: () => this.compare() },
      Escape: { what: "back to the table", run: () => go(tableOf(this.run)) },
    });
  }
}

/** @param {import("../core/contract.js").Segment} segment */
function raw(segment) {
  const text = JSON.stringify(segment, null, 2);
  const done = h("span", { class: "hint" });
  const copy = h("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(text);
    fill(done, "Copied.");
  } }, icon("copy"), "Copy");
  return h("section", null, h("p", { class: "bar" }, copy, done, h("span", { class: "hint" }, "This segment as returned by the viewer's server.")), h("pre", { class: "code raw", tabindex: "0", "aria-label": "JSON" }, text));
}

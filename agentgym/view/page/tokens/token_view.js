// @ts-check
/** The tokens of one segment, each with its mask and a color. Only tokens near the visible area are drawn. */

import { fill, h, styled } from "../core/dom.js";
import { count, difference, metric, percent } from "../core/format.js";
import { chunks } from "./chunks.js";
import { classes, MEASURES } from "./colors.js";
import { strip } from "./strip.js";
import { TokenPages } from "./token_pages.js";
import { tokenText } from "./token_text.js";

/** @typedef {import("./colors.js").Token} Token */
/** @typedef {import("../core/contract.js").Segment} Segment */
/** @typedef {import("../core/contract.js").Rollout} Rollout */
/** @typedef {{element: HTMLElement, chunk: import("./chunks.js").Chunk, isDrawn: boolean, isNear: boolean, tokens: Token[]}} Part */

/** The view of one segment's tokens. */
export class TokenView {
  /**
   * @param {object} options
   * @param {string} options.run
   * @param {Rollout} options.rollout
   * @param {Segment} options.segment
   * @param {string} options.color name of the measure
   * @param {(color: string) => void} options.onColor
   * @param {AbortSignal} options.signal
   */
  constructor({ run, rollout, segment, color, onColor, signal }) {
    this.segment = segment;
    this.measure = MEASURES.find((one) => one.name === color) ?? MEASURES[0];
    this.onColor = onColor;
    this.range = rangeOf(rollout);
    this.pages = new TokenPages(run, rollout.number, segment.index, signal);
    /** @type {Map<Element, Part>} */
    this.parts = new Map();
    this.watcher = new IntersectionObserver((entries) => entries.forEach((entry) => this.near(entry)), { rootMargin: "900px 0px" });
    signal.addEventListener("abort", () => this.watcher.disconnect());
    this.body = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens" });
    this.legend = h("ul", { class: "legend" });
    this.problem = h("p", { class: "hint" });
    this.stripPlace = h("div");
    this.tip = h("div", { class: "tip token-tip", hidden: true });
    this.element = h("section", { class: "token-view" }, h("div", { class: "token-bar" }, this.choices(), this.legend, this.stripPlace), this.problem, this.body, this.tip);
    this.lay();
    this.dress();
    this.listen(signal);
  }

  choices() {
    const group = h("div", { class: "choices", role: "group", "aria-label": "Color of the tokens" });
    for (const measure of MEASURES) {
      group.append(h("button", { type: "button", title: measure.help, "aria-pressed": String(measure === this.measure), "data-measure": measure.name, onclick: () => this.choose(measure.name) }, measure.words));
    }
    this.buttons = group;
    return group;
  }

  /** @param {string} name */
  choose(name) {
    this.measure = MEASURES.find((one) => one.name === name) ?? this.measure;
    this.buttons?.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.measure === this.measure.name)));
    this.onColor(this.measure.name);
    for (const part of this.parts.values()) if (part.isDrawn) this.paint(part);
    this.dress();
  }

  /** Selects the next measure. */
  chooseNext() {
    this.choose(MEASURES[(MEASURES.indexOf(this.measure) + 1) % MEASURES.length].name);
  }

  dress() {
    fill(this.legend, this.measure.legend(this.range).map(([color, words]) => h("li", null, h("span", { class: `sample ${this.measure.name === "mask" ? `t ${color}` : `t trained measured ${color}`}` }, "ab"), words)));
    this.map = strip(this.segment, this.measure, this.range, (token) => this.go(token));
    fill(this.stripPlace, this.map.element);
    this.showPlace();
  }

  lay() {
    for (const chunk of chunks(this.segment)) {
      const words = chunk.turn ? `turn ${chunk.turn.number}` : "context";
      const label = h("span", { class: "chunk-label" }, h("span", null, count(chunk.from)), chunk.isFirst && h("span", { class: chunk.turn ? "of-turn" : "" }, words));
      const text = h("div", { class: "chunk-text" });
      const element = h("div", { class: "chunk", "data-from": chunk.from }, label, text);
      styled(text, { "min-height": `${guess(chunk.to - chunk.from)}px` });
      this.parts.set(element, { element: text, chunk, isDrawn: false, isNear: false, tokens: [] });
      this.body.append(element);
      this.watcher.observe(element);
    }
    if (!this.segment.tokens) fill(this.problem, "This segment has no tokens.");
  }

  /** @param {IntersectionObserverEntry} entry */
  near(entry) {
    const part = this.parts.get(entry.target);
    if (!part) return;
    part.isNear = entry.isIntersecting;
    if (part.isNear && !part.isDrawn) this.draw(part);
    else if (!part.isNear && part.isDrawn) this.clear(part);
  }

  /** @param {Part} part */
  async draw(part) {
    part.isDrawn = true;
    try {
      part.tokens = await this.pages.tokens(part.chunk.from, part.chunk.to);
    } catch (error) {
      part.isDrawn = false;
      if (!this.pages.signal.aborted) fill(this.problem, `The tokens cannot be loaded: ${error instanceof Error ? error.message : error}`);
      return;
    }
    if (!part.isNear) return this.clear(part);
    this.paint(part);
    if (!this.pages.isNamed) fill(this.problem, "This run stored no vocabulary, so each token is shown by its id.");
  }

  /** @param {Part} part */
  paint(part) {
    const spans = part.tokens.map((token) => {
      const span = h("span", { class: classes(token, this.measure, this.range), "data-i": token.index });
      span.append(...tokenText(token.text));
      return span;
    });
    part.element.replaceChildren(...spans);
    part.element.style.removeProperty("min-height");
  }

  /** @param {Part} part */
  clear(part) {
    styled(part.element, { "min-height": `${part.element.offsetHeight || guess(part.chunk.to - part.chunk.from)}px` });
    part.element.replaceChildren();
    part.isDrawn = false;
  }

  /** @param {AbortSignal} signal */
  listen(signal) {
    this.body.addEventListener("pointerover", (event) => this.pointed(/** @type {HTMLElement} */ (event.target).closest("[data-i]")));
    this.body.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.body.addEventListener("click", (event) => {
      const span = /** @type {HTMLElement} */ (event.target).closest("[data-i]");
      if (span) this.choosePlace(Number(span.getAttribute("data-i")));
    });
    this.body.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.choosePlace((this.place ?? -1) + by);
    });
    let isWaiting = false;
    const scrolled = () => {
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(() => {
        isWaiting = false;
        this.showPlace();
      });
    };
    window.addEventListener("scroll", scrolled, { passive: true, signal });
  }

  /** Marks the visible tokens on the map. */
  showPlace() {
    const parts = [...this.parts].filter(([element]) => {
      const box = element.getBoundingClientRect();
      return box.bottom > 120 && box.top < window.innerHeight;
    });
    if (parts.length) this.map?.show(parts[0][1].chunk.from, parts[parts.length - 1][1].chunk.to);
  }

  /** @param {Element|null} span */
  pointed(span) {
    this.tip.hidden = !span;
    if (!span) return;
    const token = this.tokenAt(Number(span.getAttribute("data-i")));
    if (!token) return;
    fill(this.tip, facts(token));
    const [box, around] = [span.getBoundingClientRect(), this.element.getBoundingClientRect()];
    const left = Math.max(0, Math.min(box.left - around.left, around.width - 250));
    const isBelow = box.bottom + 190 < window.innerHeight;
    styled(this.tip, { left: `${left}px`, top: isBelow ? `${box.bottom - around.top + 6}px` : "auto", bottom: isBelow ? "auto" : `${around.bottom - box.top + 6}px` });
  }

  /** @param {number} index */
  tokenAt(index) {
    for (const part of this.parts.values()) if (index >= part.chunk.from && index < part.chunk.to) return part.tokens[index - part.chunk.from];
    return undefined;
  }

  /**
   * Selects a token and shows its details.
   * @param {number} index
   */
  choosePlace(index) {
    this.place = Math.max(0, Math.min(this.segment.tokens - 1, index));
    this.body.querySelector(".chosen")?.classList.remove("chosen");
    const span = this.body.querySelector(`[data-i="${this.place}"]`);
    span?.classList.add("chosen");
    span?.scrollIntoView({ block: "nearest" });
    this.pointed(span);
  }

  /**
   * Scrolls to a token, and draws it first if it is far away.
   * @param {number} index
   */
  async go(index) {
    for (const [element, part] of this.parts) {
      if (index < part.chunk.from || index >= part.chunk.to) continue;
      element.scrollIntoView({ block: "start" });
      part.isNear = true;
      if (!part.isDrawn) await this.draw(part);
      this.choosePlace(index);
    }
  }
}

/** @param {number} tokens */
const guess = (tokens) => Math.ceil(tokens / 22) * 22;

/**
 * @param {Rollout} rollout
 * @returns {import("./colors.js").Range}
 */
function rangeOf(rollout) {
  const turns = rollout.segments.flatMap((segment) => segment.turns);
  const versions = new Set(turns.flatMap((turn) => turn.versions.map(([, version]) => version)));
  return { most: turns.reduce((most, turn) => Math.max(most, Math.abs(turn.advantage ?? 0)), 0), versions: [...versions].sort((a, b) => a - b) };
}

/** @param {Token} token */
function facts(token) {
  const text = h("p", { class: "mono shown" });
  text.append(...tokenText(token.text.slice(0, 80)));
  const mask = token.trained ? "sampled, trained" : token.trained === null ? "sampled, perhaps trained" : token.sampled ? "sampled, not trained" : "context";
  const rows = [
    ["token", `${count(token.index)}, id ${token.id}`],
    ["mask", mask],
    token.turn !== null && ["turn", String(token.turn)],
    token.logprob !== null && ["log-prob", `${metric(token.logprob)} (${percent(Math.exp(token.logprob))})`],
    token.ratio !== null && ["ratio", metric(token.ratio, 6)],
    token.advantage !== null && ["advantage", difference(token.advantage)],
    token.version !== null && ["policy version", String(token.version)],
  ].filter((row) => Array.isArray(row));
  return [text, h("table", null, h("tbody", null, rows.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, value)))))];
}

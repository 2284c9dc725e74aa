// @ts-check
/** A long list of rows of equal height. Only the visible rows are drawn and requested. */

import { h, styled } from "../core/dom.js";

/** Number of rows per request. */
const PAGE = 200;
/** Number of rows drawn above and below the visible ones. */
const MORE = 12;

/**
 * @template Row
 * @typedef {object} Source
 * @property {(offset: number, limit: number) => Promise<{total: number, rows: Row[]}>} ask
 * @property {(row: Row|null, index: number) => HTMLElement} draw row is null while it is being loaded
 * @property {(total: number) => void} counted
 * @property {(error: unknown) => void} failed
 */

/**
 * The list. The caller owns the element that scrolls.
 * @template Row
 */
export class VirtualRows {
  /**
   * @param {HTMLElement} viewport
   * @param {number} height of one row, in pixels
   * @param {Source<Row>} source
   */
  constructor(viewport, height, source) {
    this.viewport = viewport;
    this.height = height;
    this.source = source;
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.viewport.append(this.space);
    this.total = 0;
    /** @type {Map<number, Row[]>} */
    this.pages = new Map();
    /** @type {Map<number, Promise<void>>} */
    this.asked = new Map();
    /** Increased to discard all pending requests. */
    this.age = 0;
    this.current = 0;
    this.isOld = false;
    this.isWaiting = false;
    this.viewport.addEventListener("scroll", () => this.later(), { passive: true });
    new ResizeObserver(() => this.later()).observe(this.viewport);
  }

  /**
   * Discards all rows and requests them again. `shift` more rows are now above the visible ones, which stay in place.
   * @param {number} [shift]
   */
  async restart(shift = 0) {
    const age = (this.age += 1);
    this.asked.clear();
    const top = this.viewport.scrollTop;
    const first = Math.floor(Math.floor(top / this.height + shift) / PAGE);
    this.isOld = true; // drawn rows stay until the first response
    await this.page(Math.max(0, first));
    if (age !== this.age) return;
    if (shift && top > 0) this.viewport.scrollTop = top + shift * this.height;
    this.draw();
  }

  /** @param {number} place */
  page(place) {
    const held = this.asked.get(place);
    if (held) return held;
    const age = this.age;
    const asking = this.source.ask(place * PAGE, PAGE).then(
      ({ total, rows }) => {
        if (age !== this.age) return;
        if (this.isOld) [this.pages, this.isOld] = [new Map(), false];
        this.pages.set(place, rows);
        if (total !== this.total || this.space.style.height === "") this.resize(total);
        this.source.counted(total);
        this.later();
      },
      (error) => {
        if (age !== this.age) return;
        this.asked.delete(place);
        this.source.failed(error);
      },
    );
    this.asked.set(place, asking);
    return asking;
  }

  /** @param {number} total */
  resize(total) {
    this.total = total;
    styled(this.space, { height: `${total * this.height}px` });
  }

  /** @param {number} index */
  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE] ?? null;
  }

  later() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.draw();
    });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.viewport.scrollTop / this.height) - MORE);
    const last = Math.min(this.total, Math.ceil((this.viewport.scrollTop + this.viewport.clientHeight) / this.height) + MORE);
    const drawn = [];
    for (let index = first; index < last; index++) {
      const row = this.row(index);
      if (!row) this.page(Math.floor(index / PAGE));
      const element = this.source.draw(row, index);
      element.classList.toggle("current", index === this.current);
      element.setAttribute("aria-selected", String(index === this.current));
      styled(element, { top: `${index * this.height}px`, height: `${this.height}px` });
      drawn.push(element);
    }
    this.space.replaceChildren(...drawn);
  }

  /**
   * Makes a row the current one, and scrolls it into view.
   * @param {number} index
   */
  go(index) {
    this.current = Math.max(0, Math.min(this.total - 1, index));
    const head = /** @type {HTMLElement|null} */ (this.viewport.querySelector("[data-head]"))?.offsetHeight ?? 0;
    const top = this.current * this.height;
    const view = this.viewport;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + this.height > view.scrollTop + view.clientHeight - head) view.scrollTop = top + this.height - view.clientHeight + head;
    this.draw();
  }

  /** Number of visible rows. */
  get inSight() {
    return Math.max(1, Math.floor(this.viewport.clientHeight / this.height) - 1);
  }
}

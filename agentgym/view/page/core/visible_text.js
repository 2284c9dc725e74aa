// @ts-check
/** Makes text from models and tools safe to display: invisible and control characters become marks. */

/**
 * Matches an ANSI escape sequence, or one invisible, control or replacement character. Line feeds and tabs
 * count as text, and so do joiners and variation selectors within an emoji.
 */
const HIDDEN = new RegExp(
  [
    "\\x1b\\[[0-9;:<=>?]*[ -/]*[@-~]",
    "(?<!\\p{Extended_Pictographic})[\\ufe00-\\ufe0f]",
    "(?<!\\p{Extended_Pictographic}[\\ufe0f\\u{1f3fb}-\\u{1f3ff}]?)\\u200d",
    "\\u200d(?!\\p{Extended_Pictographic})",
    "(?![\\n\\t\\u200d])[\\p{Cc}\\p{Cf}\\p{Zl}\\p{Zp}\\p{Co}\\p{Cs}\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u2800\\u3164\\uffa0\\ufffd\\u{e0100}-\\u{e01ef}]",
  ].join("|"),
  "gu",
);

/** @type {Record<number, [string, string]>} label and name of common characters */
const KNOWN = {
  0x00: ["NUL", "null"],
  0x07: ["BEL", "bell"],
  0x08: ["BS", "backspace"],
  0x0d: ["CR", "carriage return"],
  0x1b: ["ESC", "escape"],
  0x7f: ["DEL", "delete"],
  0xad: ["SHY", "soft hyphen"],
  0x61c: ["ALM", "Arabic letter mark"],
  0x200b: ["ZWSP", "zero-width space"],
  0x200c: ["ZWNJ", "zero-width non-joiner"],
  0x200d: ["ZWJ", "zero-width joiner"],
  0x200e: ["LRM", "left-to-right mark"],
  0x200f: ["RLM", "right-to-left mark"],
  0x2028: ["LS", "line separator"],
  0x2029: ["PS", "paragraph separator"],
  0x202a: ["LRE", "left-to-right embedding"],
  0x202b: ["RLE", "right-to-left embedding"],
  0x202c: ["PDF", "end of a direction"],
  0x202d: ["LRO", "left-to-right override"],
  0x202e: ["RLO", "right-to-left override"],
  0x2060: ["WJ", "word joiner"],
  0x2066: ["LRI", "left-to-right isolate"],
  0x2067: ["RLI", "right-to-left isolate"],
  0x2068: ["FSI", "first strong isolate"],
  0x2069: ["PDI", "end of an isolate"],
  0xfeff: ["BOM", "byte order mark"],
  0xfffd: ["\ufffd", "bytes that were not text"],
};

/**
 * Describes one hidden sequence: a short label to show, and an explanation.
 * @param {string} found
 * @returns {{label: string, why: string, broken: boolean}}
 */
function named(found) {
  const code = found.codePointAt(0) ?? 0;
  if (found.length > 2 && code === 0x1b) return { label: `ESC${found.slice(1)}`, why: "terminal escape, not executed", broken: false };
  const point = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  const [label, name] = KNOWN[code] ?? [point, code >= 0xe0000 && code < 0xe0080 ? "invisible tag" : "hidden character"];
  return { label, why: `${point} ${name}`, broken: code === 0xfffd };
}

/**
 * Splits a text at its hidden characters; every second part is hidden.
 * @param {string} text
 * @returns {{text: string, hidden: boolean}[]}
 */
export function parts(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) found.push({ text: text.slice(end, match.index), hidden: false });
    found.push({ text: match[0], hidden: true });
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push({ text: text.slice(end), hidden: false });
  return found;
}

/**
 * Returns a node that shows the text, with each hidden character as a mark.
 * @param {string} text
 * @returns {Node}
 */
export function visible(text) {
  const cut = parts(text);
  if (cut.every((part) => !part.hidden)) return document.createTextNode(text);
  const fragment = document.createDocumentFragment();
  for (const part of cut) fragment.append(part.hidden ? mark(part.text) : part.text);
  return fragment;
}

/**
 * Spells out hidden characters, for places that show only plain text: titles, labels, and the window's name.
 * @param {string} text
 * @returns {string}
 */
export function spelled(text) {
  return parts(text)
    .map((part) => (part.hidden ? `<${named(part.text).label}>` : part.text))
    .join("");
}

/** @param {string} found */
function mark(found) {
  const { label, why, broken } = named(found);
  const span = document.createElement("span");
  span.className = broken ? "mark broken" : "mark";
  span.title = why;
  span.textContent = label;
  return span;
}

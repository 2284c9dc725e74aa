"""Messages as the blocks that the page shows: text, highlighted code, diffs, tool calls and their results."""

import difflib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Block = dict[str, Any]
LARGEST_CODE = 20_000
"""Length in characters of the longest code that is highlighted. Longer code is shown plain."""
MOST_COLORED = 150_000
"""Characters of code highlighted per rollout, which takes a third of a second. The rest is shown plain."""
MOST_SECONDS = 1.0
"""CPU seconds that highlighting one rollout may take."""
MOST_COMPARED = 1000
"""Largest number of lines of an old and a new text that are compared. For longer texts, all old lines are shown before
all new ones.
"""
_FENCE = re.compile(r"^(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^\n`]*+\n(.*?)(?:^\1[ \t]*+$\n?|\Z)", re.M | re.S)
"""Fenced code. No part of the expression backtracks, so a line of any length is read once."""
_PLAIN = re.compile(r"[^\n]{1000}|\s{1000}")
"""Matches long lines and wide gaps. The highlighters of many languages take minutes on them, and block all requests."""
_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]++={0,2}")
_HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@", re.M)
_CODE_OF = {"code": "python", "script": "bash", "cmd": "bash", "command": "bash", "sql": "sql", "query": "sql"}
_OLD_AND_NEW = (("old", "new"), ("old_str", "new_str"), ("old_string", "new_string"), ("old_text", "new_text"))


@dataclass(slots=True)
class Colors:
    """Highlights code within the limits of one response."""

    left: int = MOST_COLORED
    seconds: float = MOST_SECONDS
    """CPU seconds left. A model can write code whose highlighting time grows with the square of its length."""

    def of(self, text: str, language: str) -> list[tuple[str, str]]:
        """Split the text into pieces, each with the short name of its Pygments token type, which determines its color.

        The text stays one piece with the name "" if it isn't highlighted: if it is too long, its language is "" or
        unknown, or highlighting would take too long.
        """
        if not language or len(text) > min(self.left, LARGEST_CODE) or _PLAIN.search(text):
            return [("", text)]
        self.left -= len(text)
        begin = time.thread_time()
        found = spans(text, language, within=self.seconds)
        self.seconds -= time.thread_time() - begin
        return found


def message_blocks(message: Any, colors: Colors | None = None) -> dict[str, Any]:
    """Return a message as its role and its blocks; a value that is not a message is shown as JSON."""
    if not isinstance(message, Mapping):
        return {"role": "(no message)", "blocks": [_text(_shown(message))]}
    colors = colors or Colors()
    role, blocks = _shown(message.get("role")) or "(no role)", list[Block]()
    if thinking := _shown(message.get("reasoning_content")):
        blocks.append({"kind": "thinking", "text": thinking})
    blocks += _tool_result(message, colors) if role == "tool" else content_blocks(message.get("content"), colors)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else [] if calls is None else [calls]:
        blocks += call_blocks(call, colors)
    return {"role": role, "blocks": blocks}


def content_blocks(content: Any, colors: Colors) -> list[Block]:
    """Return the blocks of a message's content, which is text or a list of parts."""
    if not isinstance(content, list | tuple):
        return list(text_blocks(_shown(content), colors))
    found = list[Block]()
    for part in content:
        found += _part_blocks(part, colors)
    return found


def text_blocks(text: str, colors: Colors) -> Iterator[Block]:
    """Yield the text as blocks, with fenced code and diffs as separate blocks."""
    end = 0
    for fence in _FENCE.finditer(text):
        if text[end : fence.start()].strip():
            yield _text(text[end : fence.start()])
        yield code_block(fence.group(3), fence.group(2), colors)
        end = fence.end()
    rest = text[end:]
    if rest.strip() or (rest and not end):
        yield diff_block(rest) if _HUNK.search(rest) else _text(rest)


def code_block(text: str, language: str, colors: Colors) -> Block:
    """Return highlighted code, or a diff if the text is one."""
    if language in ("diff", "patch") or (not language and _HUNK.search(text)):
        return diff_block(text)
    return {"kind": "code", "language": language, "text": text, "spans": colors.of(text, language)}


def diff_block(text: str) -> Block:
    """Return a unified diff as a list of lines with their signs."""
    return {"kind": "diff", "lines": [_diff_line(line) for line in text.splitlines()]}


def call_blocks(call: Any, colors: Colors) -> list[Block]:
    """Return a tool call, followed by the code in its arguments, or by a diff if they are an old and a new text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return [{"kind": "call", "name": "", "arguments": _shown(call), "id": ""}]
    given = function.get("arguments")
    shown = given if isinstance(given, str) else _pretty({} if given is None else given)
    block = {"kind": "call", "name": _shown(function.get("name")), "arguments": shown, "id": _shown(call.get("id"))}
    return [block, *_within_arguments(given, colors)] if isinstance(given, Mapping) else [block]


def spans(text: str, language: str, within: float = MOST_SECONDS) -> list[tuple[str, str]]:
    """Split the text into pieces, each with the short name of its Pygments token type, which determines its color.

    The text stays one piece with the name "" if the language is unknown, if the highlighter would change the text, or
    if highlighting takes more CPU seconds than `within`.
    """
    from pygments.lexers import get_lexer_by_name
    from pygments.token import STANDARD_TYPES
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return [("", text)]
    found, until = list[tuple[str, str]](), time.thread_time() + within
    for kind, piece in lexer.get_tokens(text):
        if time.thread_time() > until:
            return [("", text)]
        name = STANDARD_TYPES.get(kind, "")
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + piece)
        else:
            found.append((name, piece))
    same = "".join(piece for _, piece in found) == text  # a lexer may drop text that it can't parse
    return found if same else [("", text)]


def _within_arguments(given: Mapping[str, Any], colors: Colors) -> Iterator[Block]:
    for old, new in _OLD_AND_NEW:
        if isinstance(given.get(old), str) and isinstance(given.get(new), str):
            yield {"kind": "diff", "lines": _changes(given[old], given[new], colors)}
            return
    for name, value in given.items():
        if isinstance(value, str) and (name in _CODE_OF or "\n" in value):
            language = _CODE_OF.get(name) or _language_of(given)
            yield code_block(value, language, colors)


def _language_of(given: Mapping[str, Any]) -> str:
    """Return the language of the file that a call names, or "" if it names none or the language is unknown."""
    from pygments.lexers import find_lexer_class_for_filename

    path = next((given[name] for name in ("path", "file", "file_path", "filename") if name in given), None)
    if not isinstance(path, str) or "\0" in path:
        return ""
    lexer = find_lexer_class_for_filename(path[-200:])
    return lexer.aliases[0] if lexer is not None and lexer.aliases else ""


def _changes(old: str, new: str, colors: Colors) -> list[tuple[str, str]]:
    """Return the lines of both texts, each with its sign: "-", "+" or a space.

    Whole lines are compared, since comparing characters would take minutes.
    """
    before, behind, size = old.splitlines(), new.splitlines(), len(old) + len(new)
    if len(before) + len(behind) > MOST_COMPARED or size > min(colors.left, LARGEST_CODE):
        return [*_marked("-", before), *_marked("+", behind)]
    colors.left -= size
    found = list[tuple[str, str]]()
    for kind, first, last, start, stop in difflib.SequenceMatcher(None, before, behind).get_opcodes():
        if kind == "equal":
            found += _marked(" ", before[first:last])
        else:
            found += [*_marked("-", before[first:last]), *_marked("+", behind[start:stop])]
    return found


def _marked(mark: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [(mark, line) for line in lines]


def _diff_line(line: str) -> tuple[str, str]:
    mark = line[:1]
    return (mark, line[1:]) if mark in ("+", "-") else ("@", line) if mark == "@" else (" ", line.removeprefix(" "))


def _tool_result(message: Mapping[str, Any], colors: Colors) -> list[Block]:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part for part in parts if not _is_image(part)]
    said = "".join(_part_text(part) for part in texts)
    result = {
        "kind": "result",
        "name": _shown(message.get("name")),
        "text": said,
        "is_error": said.startswith(("Error", "error:", "Traceback ")),
    }
    images = [block for part in parts if _is_image(part) for block in _part_blocks(part, colors)]
    return [result, *images]


def _part_text(part: Any) -> str:
    return _shown(part.get("text")) if isinstance(part, Mapping) and "text" in part else _shown(part)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _part_blocks(part: Any, colors: Colors) -> Sequence[Block]:
    if not _is_image(part):
        return list(text_blocks(_part_text(part), colors))
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    address = url if isinstance(url, str) and _IMAGE.fullmatch(url) else None
    mime = address[5:].partition(";")[0] if address else _shown(part.get("mime") or part.get("media_type")) or "image"
    return [{"kind": "image", "mime": mime, "data_url": address}]


def _text(text: str) -> Block:
    return {"kind": "text", "text": text}


def _shown(value: object) -> str:
    """Return text unchanged, None as "", and any other value as JSON."""
    return "" if value is None else value if isinstance(value, str) else _pretty(value)


def _pretty(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=2)
    except (ValueError, TypeError, RecursionError):
        return repr(value)

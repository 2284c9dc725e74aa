"""The FAQ: each message that it quotes occurs in the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT

PAGE = (DOCS / "faq.md").read_text()
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
TABLES = [(DOCS / "docker.md", r"^\| `([^`]+)` \|")]
"""Other pages that quote messages, and the pattern that finds the messages."""
HOLE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder for an interpolated value in a message."""


@cache
def texts() -> tuple[str, ...]:
    """Return every string in the library's code, with a placeholder for each interpolated value."""
    found: list[str] = []
    for path in (ROOT / "agentgym").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part_of(part) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def part_of(node: ast.expr) -> str:
    """Return the text of an f-string's part, or the placeholder."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else HOLE


def written(message: str) -> bool:
    """Return whether a string in the code contains the message; each `...` matches any text."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)
    return any(pattern.search(text) for text in texts())


def test_the_page_has_messages() -> None:
    assert len(QUOTED) >= 20


@pytest.mark.parametrize("message", QUOTED)
def test_each_quoted_message_is_in_the_code(message: str) -> None:
    assert written(message)


@pytest.mark.parametrize(("page", "row"), TABLES, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_each_message_in_a_table_is_in_the_code(page: Path, row: str) -> None:
    found = re.findall(row, page.read_text(), re.MULTILINE)
    assert found
    assert [message for message in found if not written(message)] == []


def test_a_message_that_is_not_in_the_code_is_detected() -> None:
    assert not written("the moon is not ... enough")

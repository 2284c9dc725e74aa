"""The table in docs/families.md is the one that the tests check."""

from pathlib import Path

from tests.chat.families.table import ROWS, Row

PAGE = Path(__file__).parents[3] / "docs" / "families.md"


def line_of(row: Row) -> str:
    """Return the row as the page has it."""
    cells = [
        row.family.name,
        f"`{row.format}`",
        row.tools,
        row.parallel,
        row.thoughts,
        row.after_call,
        row.after_answer,
    ]
    return f"| {' | '.join([*cells, row.source])} |"


def test_the_page_has_the_rows_of_the_table() -> None:
    lines = PAGE.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("|---")) + 1
    shown = lines[first : lines.index("", first)]
    assert shown == [line_of(row) for row in ROWS]

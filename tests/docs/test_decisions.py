"""The decisions have one form, and name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
STATUS = r"Status: (?:accepted|superseded by \[\d+\]\(\S+\)) · Date: \d{4}-\d{2}-\d{2}"
MAX_SENTENCES = 5


def sentences(page: str) -> list[str]:
    """Return the sentences of a decision's page after title and status, without tables; code counts as one word."""
    lines = [line for line in page.splitlines()[3:] if not line.startswith("|")]
    prose = re.sub(r"`[^`]*`", "code", " ".join(lines))
    return [text for text in re.split(r"(?<=[.?!])\s+", prose.strip()) if text]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.name[:4])
def test_every_file_that_a_decision_names_exists(decision: Path) -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", decision.read_text())
    assert [name for name in named if not any((base / name).is_file() for base in (ROOT, ROOT / "agentgym"))] == []


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.name[:4])
def test_a_decision_has_number_status_and_date(decision: Path) -> None:
    title, empty, status, *_ = decision.read_text().splitlines()
    assert re.fullmatch(rf"# {int(decision.name[:4])}\. \S.*", title)
    assert empty == ""
    assert re.fullmatch(STATUS, status)


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.name[:4])
def test_a_decision_is_short_and_says_what_would_change_it(decision: Path) -> None:
    found = sentences(decision.read_text())
    assert 1 < len(found) <= MAX_SENTENCES
    assert found[-1].startswith("We would reconsider")


def test_sentences_are_counted_without_tables_and_code() -> None:
    page = (
        "# 1. Title\n\nStatus: accepted · Date: 2026-01-02\n\nOne `a.b. C`. Two, in 0.5 s\nor 1.5.\n\n| A. B. | C. |\n"
    )
    assert sentences(page) == ["One code.", "Two, in 0.5 s or 1.5."]

"""The decision records only name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.name[:4])
def test_every_file_that_a_decision_names_exists(decision: Path) -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", decision.read_text())
    assert [name for name in named if not any((base / name).is_file() for base in (ROOT, ROOT / "agentgym"))] == []

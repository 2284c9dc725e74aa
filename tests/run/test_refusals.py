"""Tyro's message about a refused command line, parsed from both of its box styles."""

import pytest

from agentgym.cli.flags import refusal

LONG = """
╭─ Value error ──────────────────────────────╮
│ Error parsing --worst: no type matching    │
│ {None}|INT could be instantiated from      │
│ ['a'].                                     │
│                                            │
│ Got errors:                                │
│ - <class 'NoneType'>: ['a'] does not match │
╰────────────────────────────────────────────╯
"""
ASCII = """
 Missing argument
 -------------------------------------------
  Missing value for argument '--worst'.
  Expected 1 values.
  ------------------------------------------
  For full helptext, run show --help
"""
"""Tyro's box if stdout supports only ASCII."""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (ASCII, "missing value for argument '--worst'. Expected 1 values"),
        (LONG, "error parsing --worst: no type matching {None}|INT could be instantiated from ['a']"),
        ("no frame\nat all.", "no frame at all"),
        ("", ""),
    ],
)
def test_a_message_box_becomes_one_line(said: str, line: str) -> None:
    assert refusal(said) == line


def test_the_line_does_not_contain_a_python_type() -> None:
    said = "Error parsing --train.betas: Could not parse arguments ['x'] into tuple type typing.Tuple[float, float]."
    assert refusal(said) == "error parsing --train.betas: Could not parse arguments ['x']"

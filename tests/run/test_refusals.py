"""What tyro says of a refused command line, read in both of its frames."""

import pytest

from agentgym.cli.flags.parsing import refusal

FRAMED = """
╭─ Unrecognized options ─────────────────────╮
│ Unrecognized options: --setps, 3           │
│ ────────────────────────────────────────── │
│ Perhaps you meant:                         │
│     --steps INT                            │
│         Batches collected and trained on.  │
│ ────────────────────────────────────────── │
│ For full helptext, run recipe.py --help    │
╰────────────────────────────────────────────╯
"""
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
 Unrecognized options
 -------------------------------------------
  Unrecognized options: --setps, 3
  ------------------------------------------
  Perhaps you meant:
      --steps INT
          Batches collected and trained on.
"""
"""What tyro draws where stdout has no other characters."""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (ASCII, "there is no option --setps; did you mean --steps?"),
        (FRAMED, "there is no option --setps; did you mean --steps?"),
        (LONG, "error parsing --worst: no type matching {None}|INT could be instantiated from ['a']"),
        ("no frame\nat all.", "no frame at all"),
        ("", ""),
    ],
)
def test_a_frame_becomes_one_line(said: str, line: str) -> None:
    assert refusal(said) == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--train.dora", "0"], "'0' after --train.dora is one word too many"),
        (["--train.dora=0"], "'0' after --train.dora is one word too many"),
        (["--steps", "3", "0"], "'0' is one word too many"),
    ],
)
def test_a_word_too_many_is_named_with_the_option_in_front_of_it(arguments: list[str], line: str) -> None:
    assert refusal(" Unrecognized options\n ----\n  Unrecognized options: 0\n", arguments) == line


def test_a_word_that_is_a_number_or_blank_is_no_option() -> None:
    assert refusal("Unrecognized options: -1", ["--train.dora", "-1"]) == "'-1' after --train.dora is one word too many"
    assert refusal("Unrecognized options: ", ["--train.dora", " "]) == "'' after --train.dora is one word too many"


def test_a_type_is_no_part_of_the_line() -> None:
    said = "Error parsing --train.betas: Could not parse arguments ['x'] into tuple type typing.Tuple[float, float]."
    assert refusal(said) == "error parsing --train.betas: Could not parse arguments ['x']"

"""The families' table: each cell is what the family's template and its format do."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat.formats import RESPONSE_FORMATS
from tests.chat.families.family import AGAIN, ASK, SAID, TOOLS, Family, seen
from tests.chat.families.table import ROWS, Row

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
FAMILIES = {row.family.name: row.family for row in ROWS}
WITH_TOOLS = [row for row in ROWS if row.tools == "template"]
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.family.name)
each_with_tools = pytest.mark.parametrize("row", WITH_TOOLS, ids=lambda row: row.family.name)


@each
def test_a_familys_format_is_recognized(row: Row) -> None:
    found = row.family.tokenizer.response_format
    assert (found.name if found else "none") == row.format


@each
def test_a_familys_template_shows_its_tools(row: Row) -> None:
    assert row.family.shows_tools() == (row.tools == "template")


@each_with_tools
def test_a_familys_call_is_read_as_its_template_writes_it(row: Row) -> None:
    assert row.family.reads(1)


@each_with_tools
def test_a_familys_parallel_calls_are_read_as_its_template_writes_them(row: Row) -> None:
    assert row.family.reads(2) == (row.parallel == "yes")


@each_with_tools
def test_a_familys_cut_call_is_malformed(row: Row) -> None:
    example = RESPONSE_FORMATS[row.format].example
    read = RESPONSE_FORMATS[row.format].parse(example[: example.index("VALUE") + 2], TOOLS)
    assert [type(call["function"]["arguments"]) for call in read["tool_calls"]] == [str]


@each
def test_a_familys_thoughts_are_shown_as_long_as_the_table_says(row: Row) -> None:
    assert row.family.thoughts() == row.thoughts


@each_with_tools
def test_a_result_is_appended_or_rendered_anew(row: Row) -> None:
    assert row.family.extends()[0] == (row.after_call == "appended")


@each_with_tools
def test_a_question_is_appended_or_rendered_anew(row: Row) -> None:
    assert row.family.extends()[1] == (row.after_answer == "appended")


def _told(family: Family) -> list[Any]:
    turn = family.turn(2) | {"content": "So."}
    results = [seen(call) | {"content": content} for call, content in zip(family.calls, ("57", "58"), strict=True)]
    return [ASK, turn, *results, SAID, AGAIN]


@pytest.mark.parametrize("vector", VECTORS["written"], ids=lambda vector: f"{vector['family']} {vector['messages']}")
def test_our_templates_write_what_published_renderers_write(vector: dict[str, Any]) -> None:
    family = FAMILIES[vector["family"]]
    written = family.tokenizer.render(_told(family)[: vector["messages"]], [], generation=True)
    assert written == vector["text"]


@pytest.mark.parametrize("vector", VECTORS["read"], ids=lambda vector: f"{vector['format']}")
def test_a_call_is_read_as_published_readers_read_it(vector: dict[str, Any]) -> None:
    read = RESPONSE_FORMATS[vector["format"]].parse(vector["text"], TOOLS)
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in read["tool_calls"]]
    if vector["calls"] is None:
        assert all(isinstance(arguments, str) for _, arguments in calls)
    else:
        assert calls == vector["calls"]

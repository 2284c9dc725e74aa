"""The families' table: each cell is what the family's template and its format do."""

import json
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.chat.formats import RESPONSE_FORMATS
from agentgym.testing import Scripted
from tests.chat.families.family import AGAIN, ASK, SAID, TOOLS, Family, seen
from tests.chat.families.table import ROWS, Row

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
FAMILIES = {row.family.name: row.family for row in ROWS}
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.family.name)


@each
def test_a_familys_format_is_recognized(row: Row) -> None:
    found = row.family.tokenizer.response_format
    assert (found.name if found else "hermes") == row.format


@each
def test_a_familys_tools_are_shown_by_its_template_or_in_the_prompt(row: Row) -> None:
    assert row.family.shows_tools() == row.tools


@each
def test_a_familys_call_is_read_as_its_template_writes_it(row: Row) -> None:
    assert row.family.reads(1)


@each
def test_a_familys_parallel_calls_are_read_as_its_template_writes_them(row: Row) -> None:
    assert row.family.reads(2) == (row.parallel == "yes")


class Looks(ag.ToolEnv[ag.Task]):
    limits = ag.Limits(turns=2)

    @ag.tool
    async def look(self, what: str) -> str:
        """Look."""
        return what


@each
async def test_a_familys_malformed_call_is_answered_in_its_format(row: Row) -> None:
    tokenizer, example = row.family.tokenizer, RESPONSE_FORMATS[row.format].example
    cut = example[: example.index("VALUE") + 2]
    replies = [f"</think>{cut}" if tokenizer.opening.rstrip().endswith("<think>") else cut, "done"]
    engine = Scripted(replies, tokenizer=tokenizer, end=row.family.end)
    played = await ag.rollout(Looks, ag.Task(id="1", prompt="go"), engine)
    told = [message["content"] for turn in played.segments[0].turns for message in turn.env_messages]
    assert played.metrics["malformed_calls"] == 1
    assert [text.endswith(f"; write each call like this:\n{example}") for text in told] == [True]


@each
def test_a_familys_thoughts_are_shown_as_long_as_the_table_says(row: Row) -> None:
    assert row.family.thoughts() == row.thoughts


@each
def test_a_result_is_appended_or_rendered_anew(row: Row) -> None:
    assert row.family.extends()[0] == (row.after_call == "appended")


@each
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

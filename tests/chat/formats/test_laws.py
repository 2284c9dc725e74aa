"""The laws that every response format obeys: linear time, no errors, whole values, and no call that goes unnoticed."""

import itertools
import re
import time

import pytest
from hypothesis import given, settings, strategies as st

from agentgym.chat.formats import RESPONSE_FORMATS, ResponseFormat
from agentgym.chat.formats.response_format import CALL_MARKS
from agentgym.engines.scripted import say
from tests.support.response_formats import TOOLS, calls

FORMATS = pytest.mark.parametrize("form", RESPONSE_FORMATS.values(), ids=list(RESPONSE_FORMATS))
EXAMPLE = [{"name": "NAME", "arguments": {"KEY": "VALUE"}}]
TAGS = re.compile(r"(<[^>]*>|\[[A-Z_]+\]|[{}\[\]\",:]|\s+)")
"""What the marks in an example look like, and what JSON consists of."""


def parts_of(form: ResponseFormat) -> list[str]:
    """Return the marks of a format, and the pieces of its example."""
    marks = {mark for pair in (*form.call_marks, *form.reasoning) for mark in pair if mark}
    return sorted({*form.marks, *marks, *filter(None, TAGS.split(form.example))})


@FORMATS
def test_the_example_of_a_format_is_a_call_in_it(form: ResponseFormat) -> None:
    read = form.parse(f"I call:\n{form.example}", TOOLS)
    assert calls(read) == EXAMPLE
    assert read["content"] == "I call:"


@FORMATS
def test_a_tool_may_have_any_name_that_mcp_allows(form: ResponseFormat) -> None:
    text = form.example.replace("NAME", "fs.read/file-2_a")
    assert calls(form.parse(text, TOOLS)) == [EXAMPLE[0] | {"name": "fs.read/file-2_a"}]


@FORMATS
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_text_makes_a_format_raise(form: ResponseFormat, data: st.DataObject) -> None:
    pieces = st.sampled_from([*parts_of(form), form.example, "\\ud83d", "9" * 5000, "1e999", "x", "look"])
    text = data.draw(st.lists(pieces, max_size=12).map("".join))
    form.read(text, TOOLS)
    read = form.parse(text, TOOLS)
    assert "tool_calls" not in read or all(call["type"] == "function" for call in read["tool_calls"])


def floods(form: ResponseFormat) -> dict[str, tuple[str, str]]:
    """Return texts that repeat one piece, as what comes before and what is repeated."""
    pieces = [piece for piece in TAGS.split(form.example) if piece]
    heads = ["", *itertools.accumulate(pieces)]
    repeated = [*parts_of(form), form.example, "{" + '"name":', '{"name": "', '{"parameters":', "<think>a</think>"]
    repeated += ["".join(pieces[i : i + n]) for n in (2, 3, 5) for i in range(len(pieces) - n)]
    return {f"{head!r} {piece!r}": (head, piece) for head in (heads[0], heads[len(heads) // 2]) for piece in repeated}


@FORMATS
def test_the_time_to_read_a_text_grows_with_its_length(form: ResponseFormat) -> None:
    def cost(head: str, piece: str, n: int) -> float:
        began = time.thread_time()
        form.parse(head + piece * n, TOOLS)
        return time.thread_time() - began

    for what, (head, piece) in floods(form).items():
        few = max(min(cost(head, piece, 200) for _ in range(2)), 0.001)
        assert min(cost(head, piece, 3200) / few for _ in range(2)) < 64, what


@FORMATS
@pytest.mark.parametrize("mark", CALL_MARKS)
def test_a_line_that_begins_like_a_call_of_any_family_is_a_malformed_call(form: ResponseFormat, mark: str) -> None:
    for text in (f"{mark}look", f"I look.\n{mark}look"):
        read = form.parse(text, TOOLS)
        assert (read["content"], len(calls(read))) == (text, 1)
        assert isinstance(calls(read)[0]["arguments"], str)


@FORMATS
def test_the_marks_of_a_format_are_known_to_all_others(form: ResponseFormat) -> None:
    for opening, _ in form.call_marks:
        assert any(opening.startswith(mark) for mark in CALL_MARKS), opening


@FORMATS
@pytest.mark.parametrize(
    "text",
    [
        '{"tool": {}, "name": "look", "args": {"at": 3}}',
        '[{"function": "look", "args": {}}]',
        '```json\n{"function": {"name": "look", "arguments": {}, "x": 1}\n}\n```',
        '{"name": "look", "arguments": {"at": 3}',
        '{"type": "function", "function": {"name": "look", "parameters": {"at": 3}}',
        '{"args": {"at": 1e999}, "name": "look"}',
        "[{'name': 'look', 'arguments': {'at': 3}}]",
    ],
)
def test_an_answer_that_begins_with_an_object_that_names_a_tool_is_a_call(form: ResponseFormat, text: str) -> None:
    assert len(calls(form.parse(text, TOOLS))) == 1
    assert "tool_calls" not in form.parse(text, [])


@FORMATS
@pytest.mark.parametrize(
    "text",
    [
        "4",
        "a < b",
        '{"name": "Bob", "age": 3}',
        '{"look": 3}',
        "Use to=5.",
        "[1, 2]",
        "see <tool> there",
        '{"name": "look", "a"',
    ],
)
def test_any_other_answer_is_no_call(form: ResponseFormat, text: str) -> None:
    assert form.parse(text, TOOLS) == say(text)


@FORMATS
def test_text_around_calls_is_kept(form: ResponseFormat) -> None:
    if form.name == "harmony":
        pytest.skip("all of its text is within messages")
    one = form.example
    assert form.parse(f"first {one}", TOOLS)["content"] == "first"
    if form.name == "mistral_list":
        return  # One list holds all calls.
    read = form.parse(f"first\n{one}\nmiddle\n{one}\nlast", TOOLS)
    assert (read["content"], calls(read)) == ("first\nmiddle\nlast", EXAMPLE * 2)


@FORMATS
def test_reasoning_before_a_call_is_not_content_and_a_call_in_it_is_not_made(form: ResponseFormat) -> None:
    for opening, closing in form.reasoning:
        read = form.parse(f"{opening}a {form.example}{closing}so {form.example}", TOOLS)
        assert (read["content"], read["reasoning_content"], calls(read)) == ("so", f"a {form.example}", EXAMPLE)

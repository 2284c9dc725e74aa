"""Messages as blocks: no part of a text is lost, and any message can be displayed."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from agentgym.view.answers import as_json
from agentgym.view.blocks import MOST_COLORED, Colors, call_blocks, content_blocks, message_blocks, spans, text_blocks
from tests.view.made_runs import HOSTILE

CODE = 'def f(x):\n    """Say."""\n    return x + 1  # one\n'


def test_text_and_fenced_code_become_blocks_in_order() -> None:
    found = list(text_blocks(f"Look:\n```python\n{CODE}```\nand\n~~~\nplain\n~~~\n", Colors()))
    assert [block["kind"] for block in found] == ["text", "code", "text", "code"]
    assert (found[1]["language"], found[1]["text"]) == ("python", CODE)
    assert ("k", "def") in found[1]["spans"]
    assert found[3]["spans"] == [("", "plain\n")]


def test_an_unclosed_fence_contains_the_rest() -> None:
    (found,) = text_blocks("```sh\nls -l\n", Colors())
    assert (found["kind"], found["text"]) == ("code", "ls -l\n")


@given(
    st.text() | st.sampled_from([CODE, HOSTILE, "a\r\nb\x0c", "\n\n  x", "'''"]),
    st.sampled_from(["python", "bash", "json", "html", "nix", ""]),
)
def test_highlighting_does_not_change_the_code(text: str, language: str) -> None:
    assert "".join(piece for _, piece in spans(text, language)) == text


def test_the_first_part_of_much_code_is_highlighted_and_all_of_it_shown() -> None:
    code = "x = 1\n" * 2000
    patient = Colors(seconds=1e9)  # however slow the machine is
    blocks = message_blocks({"role": "user", "content": f"```python\n{code}```\n" * 20}, patient)["blocks"]
    assert [block["text"] for block in blocks] == [code] * 20
    colored = [len(block["spans"]) > 1 for block in blocks]
    assert colored == [True] * (MOST_COLORED // len(code)) + [False] * (20 - MOST_COLORED // len(code))


DIFF = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@ def f\n same\n-old\n+new\n"


def test_non_ascii_letters_in_arguments_are_not_escaped() -> None:
    (found,) = call({"word": "Straße 漢字"})
    assert found["arguments"] == '{\n  "word": "Straße 漢字"\n}'


@pytest.mark.parametrize("text", [f"```diff\n{DIFF}```", f"```\n{DIFF}```", DIFF])
def test_a_unified_diff_is_shown_as_a_diff(text: str) -> None:
    (found,) = text_blocks(text, Colors())
    assert found["kind"] == "diff"
    assert found["lines"][2:] == [("@", "@@ -1,2 +1,2 @@ def f"), (" ", "same"), ("-", "old"), ("+", "new")]


def call(arguments: Any, name: str = "edit") -> list[dict[str, Any]]:
    return call_blocks(
        {"id": "call1", "type": "function", "function": {"name": name, "arguments": arguments}}, Colors()
    )


def test_a_call_shows_its_arguments_and_any_code_in_them() -> None:
    made, code = call({"code": CODE}, "python")
    assert made == {"kind": "call", "name": "python", "arguments": made["arguments"], "id": "call1"}
    assert made["arguments"].startswith('{\n  "code": "def f')
    assert (code["kind"], code["language"], code["text"]) == ("code", "python", CODE)
    _, code = call({"path": "a/b.rs", "content": "fn f() {}\n// end\n"}, "write")
    assert (code["kind"], code["language"]) == ("code", "rust")


@pytest.mark.parametrize("names", [("old", "new"), ("old_str", "new_str"), ("old_string", "new_string")])
def test_an_edit_is_shown_as_a_diff(names: tuple[str, str]) -> None:
    _, change = call({"path": "x.py", names[0]: "same\nold\n", names[1]: "same\nnew\nmore\n"})
    assert change["lines"] == [(" ", "same"), ("-", "old"), ("+", "new"), ("+", "more")]


def test_a_call_with_invalid_json_keeps_the_models_text() -> None:
    assert call('{"cmd": oops')[0]["arguments"] == '{"cmd": oops'
    assert call(None)[0]["arguments"] == "{}"


def test_tool_results_and_reasoning_are_separate_blocks() -> None:
    found = message_blocks({"role": "tool", "name": "bash", "content": HOSTILE})
    assert found["blocks"] == [{"kind": "result", "name": "bash", "text": HOSTILE, "is_error": False}]
    found = message_blocks({"role": "assistant", "reasoning_content": "hm", "content": "so"})
    assert found["blocks"] == [{"kind": "thinking", "text": "hm"}, {"kind": "text", "text": "so"}]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("data:image/png;base64,AAAA", "data:image/png;base64,AAAA"),
        ("data:image/svg+xml;base64,AAAA", None),
        ('data:image/png;base64,"><script>', None),
        ("data:text/html,<script>", None),
        ("https://evil.example/x.png", None),
        ("javascript:alert(1)", None),
        (7, None),
    ],
)
def test_an_image_is_shown_only_from_inline_data_and_never_as_svg(url: Any, shown: str | None) -> None:
    (found,) = content_blocks([{"type": "image_url", "image_url": {"url": url}}], Colors())
    assert (found["kind"], found["data_url"]) == ("image", shown)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=9), below, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["role", "content", "reasoning_content", "tool_calls", "name", "type", "text", "image_url"])


@given(st.dictionaries(FIELDS, ANYTHING, max_size=6) | ANYTHING)
def test_any_message_content_can_be_displayed(message: Any) -> None:
    found = message_blocks(message)
    assert set(found) == {"role", "blocks"}
    assert all("kind" in block for block in found["blocks"])
    as_json(found)


@pytest.mark.parametrize(("begin", "on"), [("```", "a"), ("```", " "), ("~~~", "~"), ("```a", " `")])
def test_a_line_that_only_starts_like_a_fence_is_read_once(begin: str, on: str) -> None:
    """An expression that backtracks character by character reads the line once per character, for minutes."""
    line = begin + on * 500_000
    assert list(text_blocks(line, Colors())) == [{"kind": "text", "text": line}]


def test_a_large_edit_with_similar_lines_is_compared_by_whole_lines() -> None:
    """A comparison by letters within this many lines takes minutes."""
    old, new = ([f"number {place:04d}{end}" for place in range(490)] for end in "xy")
    call = {
        "function": {"name": "edit", "arguments": {"old": "\n".join(old), "new": "\n".join(["same", *new, "same"])}}
    }
    (_, diff) = call_blocks(call, Colors())
    assert diff["lines"] == [("-", line) for line in old] + [("+", line) for line in ("same", *new, "same")]


def test_the_first_of_very_many_edits_are_compared_and_all_are_shown() -> None:
    colors = Colors(left=10)
    call = {"function": {"name": "edit", "arguments": {"old": "a\nb", "new": "a\nc"}}}
    shown = [call_blocks(call, colors)[1]["lines"] for _ in range(2)]
    assert shown == [[(" ", "a"), ("-", "b"), ("+", "c")], [("-", "a"), ("-", "b"), ("+", "a"), ("+", "c")]]


@pytest.mark.parametrize(
    ("language", "text"), [("python", "\t\n" * 9_000 + "x"), ("java", "a " * 9_000), ("console", "(" * 19_000)]
)
def test_code_with_long_lines_or_wide_gaps_is_not_highlighted(language: str, text: str) -> None:
    """The highlighters of these languages take seconds to minutes on them."""
    assert Colors().of(text, language) == [("", text)]


def test_code_that_takes_too_long_to_highlight_is_shown_plain() -> None:
    """The end of each of these comments is searched up to the end of the text."""
    text = "/*\n" * 6_000
    assert spans(text, "javascript", within=0.0) == [("", text)]
    colors = Colors(seconds=0.0)
    assert colors.of("x = 1", "python") == [("", "x = 1")]

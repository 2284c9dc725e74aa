"""Reasoning is split from the rest of a text, wherever it begins and ends, and however the text goes on."""

import re
import time

import pytest
from hypothesis import given, strategies as st

from agentgym.chat.reasoning import begins_inside, split_reasoning

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TAG = '<tool_call>\n{"name": "write", "arguments": {"text": "a <think> or </think>"}}\n</tool_call>'
ENDS = '<tool_call>\n{"name": "write", "arguments": {"text": "a </tool_call></think> b"}}\n</tool_call>'
MISTRAL = ("[THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("4", "", "4"),
        (" 4\n", "", " 4\n"),
        ("<think>\nhm\n</think>\n\n4", "hm", "4"),
        ("<think></think>4", "", "4"),
        ("so <think>hm</think> 4", "hm", "so\n4"),
        ("<think>a</think>x<think>b</think>y", "a\nb", "x\ny"),
        ("<think>a <think> b</think> 4", "a <think> b", "4"),
        ("hm\n</think>\n\n4", "hm", "4"),
        ("</think>4", "", "4"),
        ("<think>hm</think>write </think> there", "hm", "write </think> there"),
        ("<think>never closed", "never closed", ""),
        ("4 <think>never closed", "never closed", "4"),
        (TAG, "", TAG),
        (f"<think>a{CALL}b</think>{CALL}", f"a{CALL}b", CALL),
        (f"<think>a</think>{TAG}", "a", TAG),
        (f"{CALL}<think>a</think>", "", f"{CALL}<think>a</think>"),
        (f"{CALL}<think>a", "", f"{CALL}<think>a"),
        (f"a {CALL} b\n</think>4", f"a {CALL} b", "4"),
        (f"a {CALL} b</think>{TAG}", f"a {CALL} b", TAG),
        (ENDS, "", ENDS),
        (f"<think>a {CALL}", f"a {CALL}", ""),
        ("<tool_call><think>a</think>", "", "<tool_call><think>a</think>"),
    ],
)
def test_a_text_is_split_into_its_reasoning_and_the_rest(text: str, thought: str, rest: str) -> None:
    assert split_reasoning(text) == (thought, rest)


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("hm\n</think>\n\n4", "hm", "4"),
        ("<think>\nhm</think>4", "hm", "4"),
        ("never closed", "never closed", ""),
        (f"a {CALL}", f"a {CALL}", ""),
        (f"a {CALL}</think>{TAG}", f"a {CALL}", TAG),
        ("hm</think>write </think> there", "hm", "write </think> there"),
        ("a<think>b</think>4", "a<think>b", "4"),
    ],
)
def test_a_text_may_begin_inside_its_reasoning(text: str, thought: str, rest: str) -> None:
    assert split_reasoning(text, inside=True) == (thought, rest)


def test_models_have_marks_of_their_own() -> None:
    text = '[THINK]a <think>[/THINK]b[TOOL_CALLS]look[ARGS]{"at": "[THINK]"}'
    rest = text.partition("[/THINK]")[2]
    assert split_reasoning(text, marks=[MISTRAL], calls=[("[TOOL_CALLS]", "")]) == ("a <think>", rest)
    assert split_reasoning("[THINK]a[/THINK]b", marks=[("<think>", "</think>"), MISTRAL]) == ("a", "b")
    assert split_reasoning("a[/THINK]b", inside=True, marks=[("<think>", "</think>"), MISTRAL]) == ("a", "b")


@pytest.mark.parametrize(
    ("opening", "template", "inside"),
    [
        ("assistant\n", "", False),
        ("assistant\n", "{{ m.content.split('</think>') }}", None),
        ("assistant\n<think>\n", "</think>", True),
        ("assistant\n<think>\n\n</think>\n\n", "</think>", None),
    ],
)
def test_a_turns_opening_may_leave_the_reasoning_open(opening: str, template: str, inside: bool | None) -> None:
    assert begins_inside(opening, template) is inside


def test_a_closing_mark_is_text_if_the_text_does_not_begin_inside_its_reasoning() -> None:
    for text in ("hm</think>4", f"{CALL}</think>"):
        assert split_reasoning(text, inside=False) == ("", text)


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "a", " ", "\n"])).map("".join)


@given(PIECES, st.sampled_from([None, False, True]))
def test_no_text_is_lost(text: str, inside: bool | None) -> None:
    thought, rest = split_reasoning(text, inside=inside)

    def letters(written: str) -> list[str]:
        return sorted(re.sub("</?think>|\\s", "", written))

    assert letters(thought + rest) == letters(text)


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<think>a</think>", "<tool_call>", "<tool_call></think>", "<"]
)
def test_the_time_grows_with_the_length_of_the_text(piece: str) -> None:
    def cost(n: int) -> float:
        began = time.thread_time()
        for inside in (None, False, True):
            split_reasoning(piece * n, inside=inside)
        return time.thread_time() - began

    assert cost(160_000) < 32 * max(min(cost(20_000) for _ in range(3)), 0.001)

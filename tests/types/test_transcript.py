"""Transcripts as text: shortened, safe for a terminal, each message once."""

import io
from copy import copy
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from agentgym.engines.scripted import call, say
from agentgym.errors import Failure
from agentgym.scheduling.accounting import Groups
from agentgym.testing import sample
from agentgym.types.completion import Completion, Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.types.transcript import SegmentTranscript, call_text, plain_text, printable, shorten, show


def said(*messages: Message, **given: Any) -> SegmentTranscript:
    return SegmentTranscript(**{"index": 0, "kind": "root", "parent": None, "messages": messages, **given})


ASK, ANSWER, LAST = Message(role="user", content="Go."), say("42"), Message(role="user", content="Sure?")
EVIL = "\x1b[2J\x07\r\x9b1m\ud800\u202e"
"""Clears a terminal, rings its bell, returns to the line's start, and cannot be encoded."""


@given(st.text(alphabet=st.characters(categories=("Cc", "Cs", "Cf", "Zl", "Zp", "Lu", "Zs"))))
def test_printed_text_can_be_encoded_and_cannot_control_the_terminal(text: str) -> None:
    shown = printable(text)
    shown.encode("utf-8")
    assert not [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160]


def test_text_in_any_script_is_unchanged() -> None:
    assert printable("日本\u3000語 é\u00a0😀\tx\n") == "日本\u3000語 é\u00a0😀\tx\n"


def test_a_made_up_tool_name_is_escaped_and_stays_on_its_line() -> None:
    text = plain_text([said(Message(role="tool", content="no such tool", name=f"{EVIL}\nuser: obey"))])
    assert text == r"tool \x1b[2J\x07\r\x9b1m\ud800\u202e\nuser: obey: no such tool"


def test_a_long_text_keeps_its_head_and_tail_and_reports_the_cut() -> None:
    assert shorten("abcdefgh", 4) == "ab\n[... 4 of 8 characters not shown ...]\ngh"
    assert shorten("abcd", 4) == "abcd"
    assert shorten("abcdefgh", None) == "abcdefgh"


def test_calls_are_printed_as_code_and_invalid_ones_as_written() -> None:
    assert call_text(call("bash", cmd="ls", n=2)["tool_calls"][0]) == 'bash(cmd="ls", n=2)'
    assert call_text({"function": {"name": "", "arguments": '{"name": oops'}}) == '({"name": oops)'


def test_each_message_is_a_line_with_its_role_even_if_it_is_empty() -> None:
    thought = Message(role="assistant", content="", reasoning_content="Hm.\nWell.")
    found = Message(role="tool", content="", name="look")
    assert plain_text([said(ASK, thought, found)]).splitlines() == [
        "user: Go.",
        "assistant thinking: Hm.",
        "    Well.",
        "tool look: ",
    ]


class Silent:
    """An object that can be neither written as text nor compared."""

    def __repr__(self) -> str:
        raise KeyError("repr")

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


ROUND: list[Any] = []
ROUND.append(ROUND)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "é"}]}, "user: é"),
        ({"role": "user", "content": [{"type": "audio", "text": "é"}, 7]}, 'user: [{"type": "audio", "text": "é"}, 7]'),
        ({"role": "user", "content": 7}, "user: 7"),
        ({"role": "user", "content": ROUND}, "user: [[...]]"),
        ({"role": "user", "content": Silent()}, "user: <Silent>"),
        ({"role": "user", "content": None}, "user: "),
        ({"role": ["user"], "name": 3}, '["user"] 3: '),
        ({"content": "Go."}, "(no role): Go."),
        ({}, "(no role): "),
        ("Go.", "(no message): Go."),
        ({"role": "assistant", "tool_calls": 5}, "assistant calls: 5"),
        ({"role": "assistant", "tool_calls": [{"function": "look"}]}, 'assistant calls: {"function": "look"}'),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "assistant calls: ()"),
        (call("look", at={1, 2}, by=Silent()), "assistant calls: look(at={1, 2}, by=<Silent>)"),
        ({"role": "assistant", "reasoning_content": ["Hm."]}, 'assistant thinking: ["Hm."]'),
    ],
)
def test_a_message_made_by_hand_is_printed_whatever_its_fields_contain(message: Any, shown: str) -> None:
    segments = [said(message), said(copy(message), index=1, kind="fork", parent=0, opened=1)]
    assert plain_text(segments[:1]) == shown
    assert plain_text(segments).splitlines()[1] == shown
    show("head", segments, "foot", console=Console(file=io.StringIO()))


def test_inherited_messages_are_counted_and_similar_ones_are_printed() -> None:
    root = said(ASK, ANSWER)
    fork = said(ASK, ANSWER, LAST, ANSWER, index=1, kind="fork", parent=0, opened=3)
    assert plain_text([root, fork]).splitlines() == [
        "--- segment 0: root",
        "user: Go.",
        "assistant: 42",
        "--- segment 1: fork of segment 0",
        "[2 messages as in segment 0]",
        "user: Sure?",
        "assistant: 42",
    ]


def test_a_segment_alone_is_printed_in_full() -> None:
    fork = said(ASK, LAST, index=1, kind="fork", parent=0, opened=2)
    assert plain_text([fork]).splitlines() == ["user: Go.", "user: Sure?"]


def turn(**given: Any) -> Turn:
    fields = {"start": 1, "stop": 3, "finish_reason": "stop", "versions": (Version(0, 0),), "message": ANSWER}
    return Turn(**{**fields, **given})


def rollout(**given: Any) -> Rollout:
    segment = Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=[1, 2, 3],  # type: ignore[arg-type]
        sampled=[0, 1, 1],  # type: ignore[arg-type]
        logprobs=[0, -0.5, -0.5],  # type: ignore[arg-type]
        turns=(turn(),),
        prompt_messages=(ASK,),
    )
    fields = {"rollout_id": "t/0", "group_id": "t", "segments": (segment,), "reward": 0.5, "stop_reason": "answer"}
    return Rollout(**{**fields, **given})


FAILED: dict[str, Any] = {
    "reward": None,
    "stop_reason": "error",
    "failure": Failure(type="EnvError", message=f"Desk.step: {EVIL}", traceback="Traceback ..\n  line\n"),
}


def test_a_rollout_prints_its_messages_and_rewards() -> None:
    assert str(rollout(rewards={"right": 0.5}, metrics={"turns": 1})).splitlines() == [
        "rollout t/0: reward 0.5, stopped by answer, 1 turn, 2 sampled tokens, 1 segment",
        "user: Go.",
        "assistant: 42",
        "rewards: right 0.5",
        "metrics: turns 1",
    ]


def test_a_failed_rollout_prints_its_traceback_and_cannot_control_the_terminal() -> None:
    text = str(rollout(rollout_id=f"{EVIL}/0", **FAILED))
    text.encode()
    assert "\x1b" not in text
    assert text.splitlines()[-3:] == [
        r"failed: EnvError: Desk.step: \x1b[2J\x07\r\x9b1m\ud800\u202e",
        "Traceback ..",
        "  line",
    ]


@pytest.mark.parametrize("colors", [True, False])
def test_show_prints_the_same_with_colors_if_the_terminal_supports_them(colors: bool) -> None:
    out = io.StringIO()
    rollout(metrics={"x": 1}).show(console=Console(file=out, force_terminal=colors, width=200, highlight=False))
    assert ("\x1b[" in out.getvalue()) == colors
    for part in ("reward 0.5, stopped by answer", "user", "Go.", "assistant", "42", "metrics: x 1"):
        assert part in out.getvalue()


def test_show_escapes_model_output_and_cuts_it_unless_full_is_set() -> None:
    answer = say(EVIL + "x" * 5000)
    for full, shown in ((False, False), (True, True)):
        out, made = io.StringIO(), rollout()
        segment = made.segments[0]
        object.__setattr__(segment, "turns", (turn(message=answer),))
        made.show(full=full, console=Console(file=out, width=10_000))
        assert "\x1b" not in out.getvalue()
        assert ("x" * 5000 in out.getvalue()) == shown


def test_a_segments_title_cannot_control_the_terminal_or_forge_a_line() -> None:
    evil = f"{EVIL}\nuser: obey"
    out, segments = io.StringIO(), [said(kind=evil, notes=(evil,)), said(index=1, kind=evil, parent=0)]
    show("", segments, "", console=Console(file=out, width=10_000))
    for text in (out.getvalue(), plain_text(segments)):
        assert "\x1b" not in text
        assert "\x9b" not in text
        assert not [line for line in text.splitlines() if line.startswith("user: obey")]


def test_every_repr_is_one_short_line() -> None:
    played = rollout()
    completion = Completion(token_ids=[1], logprobs=[-0.5], finish_reason="stop", versions=(Version(0, 7),))
    group = Group(group_id="t", rollouts=(played, rollout(rollout_id="t/1", **FAILED)))
    assert [repr(thing) for thing in (completion, turn(message=call("bash")), played.segments[0], group)] == [
        "<Completion: 1 ids, stop, policy version 7>",
        "<Turn 0: 2 ids, stop, calls 'bash'>",
        "<Segment 0 root: 1 turns, 3 ids>",
        "<Group t: 2 rollouts, rewards 0.5, failed>",
    ]
    assert repr(played) == "<Rollout t/0: reward 0.5, stopped by answer, 1 turn, 2 sampled tokens, 1 segment>"
    assert repr(Groups([group])) == "<Groups: 1 groups, 2 rollouts, 1 failed, mean reward 0.5>"
    assert repr(sample()).startswith("<Sample ")
    assert len(repr(sample())) < 120

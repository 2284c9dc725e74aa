"""Content parts: parsed, refused by position, joined, and displayed as text."""

from typing import Any

import pytest
from pydantic import ValidationError

import agentgym as ag
from agentgym.types.messages import content_of, first_image, joined, text_of
from agentgym.types.transcript import SegmentTranscript, plain_text
from tests.types.messages.pictures import PART, PNG, SHOWN, URL, text_part

LOW = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("one text", "one text"),
        (["a", text_part("b")], "a\nb"),
        (["a", ag.Image(PNG)], [text_part("a"), PART]),
        ((PART, "", text_part("b")), [PART, text_part("b")]),
        ([LOW], [LOW]),
        ([{**PART, "text": None}, {"type": "text", "text": "b", "image_url": None}], [PART, text_part("b")]),
        (["\ud800", PART], [text_part("\ud800"), PART]),
    ],
)
def test_content_is_stored_as_text_or_as_parts_with_an_image(given: Any, kept: Any) -> None:
    assert content_of(given, "content") == kept
    assert content_of(kept, "content") == kept


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, r"^content: must be text, or a list of parts .*, got NoneType"),
        ([], r"^content: must not be an empty list of parts"),
        (["a", 3], r"^content\[1\]: must be text, an ag\.Image or a part, got int"),
        ([{"type": "image"}], r"^content\[0\]: must be .*, got \{type: 'image'\}"),
        ([{"type": "input_audio", "input_audio": "x"}], r"^content\[0\]: must be .*, got \{type: 'input_audio'"),
        ([{"type": "text", "text": 3}], r"^content\[0\]\.text: must be text, got int"),
        ([{"type": "image_url", "image_url": URL}], r"^content\[0\]\.image_url: must be an object .*, got str"),
        ([{"type": "image_url", "image_url": {"url": URL[:-1]}}], r"^content\[0\]\.image_url\.url: .* is not base64"),
        ([{"type": "image_url", "image_url": {}}], r"^content\[0\]\.image_url\.url: must be a base64 data URL"),
        ([{"type": "image_url", "image_url": {"url": URL, "x": 1}}], r"^content\[0\]\.image_url: .*, but also has 'x'"),
        ([{"type": "image_url", "image_url": {"url": URL, "detail": "?"}}], r"image_url\.detail: must be one of auto"),
        ([{**PART, "cache_control": {}}], r"^content\[0\]: must be .*cache_control"),
    ],
)
def test_an_invalid_part_is_refused_by_its_position(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        content_of(given, "content")


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_an_image_in_a_role_that_accepts_none_is_refused(role: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^content\[1\]: a message with the role '{role}' can't have an image; put it in"
    ):
        content_of(["a", PART], "content", role)
    assert content_of(["a", "b"], "content", role) == "a\nb"


def test_a_prompt_with_an_image_is_one_message_or_messages_with_parts() -> None:
    task = ag.Task(id="t", prompt=["How many?", ag.Image(PNG)])
    assert task.prompt == ({"role": "user", "content": [text_part("How many?"), PART]},)
    assert ag.Task(id="t", prompt=[ag.Message(role="user", content=["How many?", ag.Image(PNG)])]) == task
    assert ag.Task.model_validate_json(task.model_dump_json()) == task
    with pytest.raises(
        ValidationError, match=r"prompt\.0\.content\n.*content\[0\]\.image_url\.url: must be a base64 data URL"
    ):
        ag.Task(id="t", prompt=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "cat.png"}}]}])


def test_joining_contents_adds_a_separator_only_between_texts() -> None:
    assert joined(["a", "", "b"], "\n") == "a\nb"
    assert joined(["a", [PART], "b", [text_part("c"), PART]], "\n") == [
        *(text_part("a"), PART),
        *(text_part("b\nc"), PART),
    ]


def test_an_image_is_displayed_as_a_placeholder() -> None:
    content = [text_part("Look:"), PART]
    assert text_of(content) == f"Look:\n{SHOWN}"
    assert text_of([ag.Image(PNG + bytes(12_000)).part]) == "[image/png, 12 kB]"
    assert text_of([ag.Image(PNG + bytes(3_400_000)).part]) == "[image/png, 3.4 MB]"
    said = SegmentTranscript(0, "root", None, (ag.Message(role="user", content=content),))
    assert plain_text([said]) == f"user: Look:\n    {SHOWN}"


def test_the_first_image_is_found_by_its_position() -> None:
    said = [ag.Message(role="user", content="a"), ag.Message(role="user", content=["a", ag.Image(PNG)])]
    assert first_image(said) == "messages[1].content[1]"
    assert first_image(said[:1]) is None

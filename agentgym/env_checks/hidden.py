"""Values that the model must not read, looked for in what it reads."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentgym.env_checks.findings import Finding
from agentgym.env_checks.plays import Play
from agentgym.types import Message, Task

HIDDEN_FIELDS = (
    "answer",
    "answers",
    "solution",
    "expected",
    "gold",
    "secret",
    "check",
    "hidden",
    "hidden_tests",
    "verifier",
)
"""Fields of a task that are taken for hidden where their text is not in its prompt."""
CODE_FIELDS = ("solution", "secret", "check", "hidden", "hidden_tests", "verifier")
"""Those of them that no honest tool has a reason to show."""
CHANGE = "keep it out of what tools return and raise, and out of files that the box can read"


def check_hidden(task: Task, secrets: Sequence[str], plays: Iterable[Play]) -> list[Finding]:
    """A secret that the model reads before it wrote it itself, one finding for each secret and place.

    `secrets` may be in no message at all. Hidden fields of the task are looked for in the first prompt and in the text
    of exceptions; a long text of a field that holds a check or a solution also in what tools return. An answer in what
    a tool returns is mostly what the tool is for, and is not reported.
    """
    found: dict[str, Finding] = {}
    for play in plays:
        for what, text in _all(task, secrets):
            place = _place(play, text, tools=what == "secrets" or (what in CODE_FIELDS and len(text) >= 8))
            if place is not None:
                named = "a text of secrets=[...]" if what == "secrets" else f"the task's {what!r}"
                finding = Finding("secret", f"{named} ({text!r:.60}) is in {place}, which the model reads", CHANGE)
                found.setdefault(str(finding), finding)
    return list(found.values())


def _all(task: Task, secrets: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from (("secrets", text) for text in secrets)
    prompt = " ".join(str(message["content"]) for message in task.prompt)
    for name in HIDDEN_FIELDS:
        value: Any = getattr(task, name, None)
        is_text = isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) >= 2
        if is_text and not _holds(prompt, str(value)):
            yield name, str(value)


def _place(play: Play, secret: str, *, tools: bool) -> str | None:
    """Where the model first reads the secret; None where it does not, or had written it before."""
    for message in play.prompt:
        if _holds(str(message["content"]), secret):
            return "the first prompt"
    for turn in play.turns:
        if _holds(repr(turn.action), secret) or turn.over:
            return None
        for message in turn.messages:
            if _holds(str(message["content"]), secret) and (tools or _is_exception(message)):
                return f"the answer of tool {message['name']!r}" if "name" in message else "the answer of step()"
    return None


def _is_exception(message: Message) -> bool:
    return message["role"] == "tool" and bool(re.match(r"error: tool '[^']*' failed: ", str(message["content"])))


def _holds(text: str, secret: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text))

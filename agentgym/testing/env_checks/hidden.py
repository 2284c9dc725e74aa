"""Search for secrets in the texts that the model reads."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentgym.testing.env_checks.findings import Finding
from agentgym.testing.env_checks.observed import ObservedRollout
from agentgym.types.messages import Message, text_of
from agentgym.types.task import Task

CHECKS = ("solution", "check", "hidden", "hidden_tests", "verifier")
"""Task fields that no prompt and no tool may show, if they contain at least `LONG` characters of text."""
ANSWERS = ("answer", "answers", "expected", "gold", "secret", *CHECKS)
"""Fields that no tool exception may show. Tool results may show them, because tools exist to find the answer."""
LONG = 8
CHANGE = "keep it out of prompts, tool results, error messages, and files that the sandbox can read"


def check_hidden(task: Task, secrets: Sequence[str], plays: Iterable[ObservedRollout]) -> list[Finding]:
    """Return a finding for each secret that the model reads without having written it before.

    A secret that is found in several places has a finding for each. `secrets`, and a check or solution in a field of
    the task, must not be in any message; an answer must not be in any exception text. Text in the task's own prompt
    isn't secret.
    """
    found: dict[str, Finding] = {}
    for play in plays:
        for what, text in _all(task, secrets):
            place = _place(play, text, anywhere=what == "secrets" or (what in CHECKS and len(text) >= LONG))
            if place is not None:
                named = "a text of secrets=[...]" if what == "secrets" else f"the task's {what!r}"
                finding = Finding("secret", f"{named} ({text!r:.60}) is in {place}, which the model reads", CHANGE)
                found.setdefault(str(finding), finding)
    return list(found.values())


def _all(task: Task, secrets: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from (("secrets", text) for text in secrets)
    prompt = " ".join(text_of(message["content"]) for message in task.prompt)
    for name in ANSWERS:
        value: Any = getattr(task, name, None)
        is_text = isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) >= 2
        if is_text and not _holds(prompt, str(value)):
            yield name, str(value)


def _place(play: ObservedRollout, secret: str, *, anywhere: bool) -> str | None:
    """Return a phrase for where the model first reads the secret; None if it never does or had written it before.

    Only the exceptions of tools are searched, or, if `anywhere`, the first prompt and all messages.
    """
    if anywhere and any(_holds(text_of(message["content"]), secret) for message in play.prompt):
        return "the first prompt"
    for turn in play.turns:
        if turn.over or any(_holds(text, secret) for text in _written(turn.action)):
            return None
        for message in turn.messages:
            if _holds(text_of(message["content"]), secret) and (anywhere or _is_exception(message)):
                return f"a result of tool {message['name']!r}" if "name" in message else "a message of step()"
    return None


def _written(action: Message) -> Iterator[str]:
    """Yield the texts that the model wrote in one message."""
    yield str(action["content"])
    for call in action.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        yield from [arguments] if isinstance(arguments, str) else map(str, arguments.values())


def _is_exception(message: Message) -> bool:
    return message["role"] == "tool" and bool(re.match(r"error: tool '[^']*' failed: ", text_of(message["content"])))


def _holds(text: str, secret: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text))

"""Alternative forms of a conversation, for templates that reject the original.

Templates reject conversations that their models weren't trained on: two calls in one turn, a user message after a tool
message, or arguments that aren't an object. Such a conversation is rendered in another form, so that it can continue.
Sampled ids never change; these forms only affect the text after them and the text of a new segment.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from agentgym.chat.tools_in_prompt import calls_as_text
from agentgym.types.messages import SEE_ELSEWHERE, Message, first_image

T = TypeVar("T")
Render = Callable[[Sequence[Message]], str]

_ASK = Message(role="user", content="?")
_SAY = Message(role="assistant", content="so")


def is_malformed(reply: Message) -> bool:
    """Return whether a call's arguments are text instead of an object, because the model's call wasn't valid."""
    for call in reply.get("tool_calls", ()):  # noqa: SIM110  It runs once a turn, and any() costs twice as much.
        if isinstance(call["function"]["arguments"], str):
            return True
    return False


def _said(reply: Message, body: str) -> Message:
    """Return the reply as plain text, without calls.

    Args:
        reply: The reply.
        body: The text that the model sampled. It becomes the content, unless a call is malformed: then the reply's
            own content is kept, because it already contains the model's whole text. If it is empty, as in a history
            that was not sampled here, the calls are written as text.
    """
    if is_malformed(reply):
        body = calls_as_text(reply)["content"]
    return Message(role="assistant", content=body)


def _called(reply: Message) -> Message:
    """Return the reply as calls only. A malformed call gets an object whose only argument is the model's text."""
    calls = [call.copy() for call in reply["tool_calls"]]
    for call in calls:
        made = call["function"]["arguments"]
        name = call["function"]["name"] or "unknown"
        call["function"] = {"name": name, "arguments": made if isinstance(made, dict) else {"raw": made}}
    return Message(role="assistant", content="", tool_calls=calls)


def readable(reply: Message, *, as_calls: bool) -> Message:
    """Return a reply that contains a malformed call in a form that most templates accept.

    Args:
        reply: The reply.
        as_calls: Whether to keep only the calls, each with valid arguments. If False, only the text is kept.
    """
    return _called(reply) if as_calls else _said(reply, "")


def _forms(reply: Message, body: str, *, as_calls: bool) -> list[Message]:
    """Return the forms in which to try a reply, the closest to the original first.

    Args:
        reply: The reply.
        body: The text that the model sampled.
        as_calls: Whether a reply with a malformed call is tried as calls first, and not as text.
    """
    if "tool_calls" not in reply:
        return [reply]
    first = readable(reply, as_calls=as_calls) if is_malformed(reply) else reply
    return [first, _said(reply, body), _called(reply)]


def joined(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with each user message merged into a user or tool message directly before it."""
    made: list[Message] = []
    for message in messages:
        if made and message["role"] == "user" and made[-1]["role"] in ("user", "tool"):
            text = "\n\n".join(filter(None, [made[-1]["content"], message["content"]]))
            made[-1] = made[-1] | Message(role=made[-1]["role"], content=text)
        else:
            made.append(message)
    return made


def from_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with tool messages turned into user messages and adjacent user messages merged."""
    told = [Message(role="user", content=m["content"]) if m["role"] == "tool" else m for m in messages]
    return joined(told)


def fits(
    reply: Message, body: str, new: Sequence[Message], *, as_calls: bool
) -> Iterator[tuple[Message, list[Message]]]:
    """Yield the forms in which to try a reply and its answers, the closest to the original first.

    Args:
        reply: The reply.
        body: The text that the model sampled.
        new: The messages that answer the reply.
        as_calls: Whether a reply with a malformed call is tried as calls first, and not as text.
    """
    forms = _forms(reply, body, as_calls=as_calls)
    for told in ([*new], joined(new)):
        yield from ((form, told) for form in forms)
    if "tool_calls" in reply:
        yield _said(reply, body), from_user(new)


def history_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the forms in which to try a whole conversation, the closest to the original first."""
    shown = [_said(m, "") if is_malformed(m) else m for m in messages]
    yield shown
    yield joined(shown)
    yield joined([_called(m) if is_malformed(m) else m for m in messages])
    yield from_user([calls_as_text(m) for m in shown])


def first_rendered(render: Render, forms: Iterable[tuple[T, Sequence[Message]]]) -> tuple[T, str]:
    """Render the forms in order, until the template accepts one. Return that form and its text.

    If the template rejects all forms, the error for the first one is raised.
    """
    refused: Exception | None = None
    for form, messages in forms:
        try:
            return form, render(messages)
        except Exception as error:  # Templates can raise anything.
            refused = refused or error
    assert refused is not None
    raise refused


def check_messages(messages: Sequence[Message], *, answers: bool = False, sees: bool = False) -> None:
    """Check that every message has a role and a content that templates neither drop nor reject.

    Args:
        messages: The messages.
        answers: Whether they answer a turn, so that the role "assistant" isn't allowed.
        sees: Whether images are allowed.

    Raises:
        ValueError: If a role or content isn't allowed. The message names the field.
    """
    roles = _ANSWERS if answers else _ROLES
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in roles:
            raise ValueError(f"messages[{i}].role: must be one of {', '.join(roles)}, got {role!r}")
        if not isinstance(content, str) and not (sees and first_image([message])):
            if first_image([message]) is None:
                raise ValueError(f"messages[{i}].content: must be text, got {type(content).__name__}")
            raise ValueError(
                f"messages[{i}].content: contains an image, but this engine supports only text, also in training; "
                f"{SEE_ELSEWHERE}"
            )


_ANSWERS = ("system", "user", "tool")
_ROLES = (*_ANSWERS, "assistant")


def wants_calls(render: Render) -> bool:
    """Return whether the template rejects a tool message without a call before it, and accepts it with one."""
    broken = Message(role="assistant", content="look(")
    bare = Message(role="tool", content="error", name="look", tool_call_id="call00100")
    asked = Message(
        role="assistant",
        content="",
        tool_calls=[{"id": "call00100", "type": "function", "function": {"name": "look", "arguments": {"raw": "("}}}],
    )
    return not _takes(render, [_ASK, broken, bare, _SAY, _ASK]) and _takes(render, [_ASK, asked, bare, _SAY, _ASK])


def _takes(render: Render, messages: Sequence[Message]) -> bool:
    try:
        render(messages)
    except Exception:  # Templates can raise anything.
        return False
    return True

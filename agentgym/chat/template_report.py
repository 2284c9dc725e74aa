"""Checks of a chat template with a conversation that grows turn by turn, for `agentgym doctor --model`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from agentgym.chat.chat import Chat
from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.chat.tools_check import TO_DO, why_not_template
from agentgym.types.messages import Message, ToolCall

ARGUMENTS = {"text": 'a "b"\n é <c>', "count": 2}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Take a note.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["text", "count"],
            },
        },
    }
]
_ASK = Message(role="user", content="What is two and two?")
_AGAIN = Message(role="user", content="Are you sure?")
_SAID = Message(role="assistant", content="It is four.")
_THOUGHT = Message(role="assistant", content="It is four.", reasoning_content="Let me count.")
_CALLED = Message(
    role="assistant",
    content="",
    tool_calls=[ToolCall(id="call00100", type="function", function={"name": "note", "arguments": ARGUMENTS})],
)
_SEEN = Message(role="tool", content="noted", name="note", tool_call_id="call00100")


class TemplateCheck(NamedTuple):
    """The result of one check of a chat template."""

    name: str
    ok: bool
    detail: str
    """The problem and its consequence; "" if the check passed."""


def check_template(tokenizer: ChatTokenizer) -> Iterator[TemplateCheck]:
    """Run the checks of a chat template, and yield the result of each.

    They find out whether the template only appends text, and whether tool calls are parsed back as they were written.
    """
    yield _checked("appends text", lambda: _appends(tokenizer, [_SAID, _AGAIN, _SAID, _AGAIN], []))
    yield _checked("appends calls", lambda: _appends(tokenizer, [_CALLED, _SEEN, _CALLED, _SEEN], TOOLS))
    yield _checked("appends thought", lambda: _appends(tokenizer, [_THOUGHT, _AGAIN, _THOUGHT, _AGAIN], []))
    yield _checked("separators", lambda: _exact(tokenizer))
    yield _checked("tool calls", lambda: _round_trip(tokenizer))


def _checked(name: str, ask: Callable[[], str]) -> TemplateCheck:
    """Run one check and return its result.

    The check also fails if the template rejects the chat.

    Args:
        name: The name of the check.
        ask: Function that runs the check. It returns the problem, or "" if there is none.
    """
    try:
        wrong = ask()
    except _Found as found:
        wrong = str(found)
    except Exception as error:  # Templates can raise anything.
        wrong = f"the template refuses the chat: {type(error).__name__}: {error}"
    return TemplateCheck(name, not wrong, wrong)


def _appends(tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    before = tokenizer.render([_ASK], tools, generation=True)
    for n in range(2, len(messages) + 1, 2):
        after = tokenizer.render([_ASK, *messages[:n]], tools, generation=True)
        if not after.startswith(before):
            return "the template rewrites text that it rendered earlier, so a new segment opens each time (rerender)"
        before = after
    return ""


class _Found(Exception):
    """Raised by a helper of a check that finds a problem. The message is the problem."""


def _turn(tokenizer: ChatTokenizer, told: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the text of an assistant turn as the template writes it, and the delimiter that ends it.

    Args:
        tokenizer: The tokenizer with the template.
        told: The assistant turn, and any messages after it. They are rendered after a user's question.
        tools: The schemas of the tools.

    Raises:
        _Found: If the turn doesn't start with the generation prompt, or if nothing ends a turn.
    """
    opened = tokenizer.render([_ASK], tools, generation=True)
    whole = tokenizer.render([_ASK, *told], tools, generation=False)
    if not whole.startswith(opened):
        what = "a turn with a call" if "tool_calls" in told[0] else "an assistant's turn"
        raise _Found(f"{what} does not start with the generation prompt")
    end = _end_mark(tokenizer)
    body, _, _ = whole[len(opened) :].partition(end)
    return body, end


def _end_mark(tokenizer: ChatTokenizer) -> str:
    """Return the delimiter directly after an assistant's text: the end of its turn, or the start of the next one."""
    opened = tokenizer.render([_ASK], [], generation=True)
    for messages in ([_ASK, _SAID], [_ASK, _SAID, _AGAIN]):
        told = tokenizer.render(messages, [], generation=False)
        if not told.startswith(opened) or _SAID["content"] not in told[len(opened) :]:
            raise _Found("an assistant's turn does not start with the generation prompt")
        behind = told[len(opened) :].partition(_SAID["content"])[2]
        if behind:
            return tokenizer.decode(tokenizer.encode(behind)[:1])
    raise _Found("nothing ends an assistant's turn, so the engine cannot know where to stop")


def end_of_turn(tokenizer: ChatTokenizer) -> str | None:
    """Return the delimiter that the template writes after an assistant's text, or None if it writes none."""
    try:
        return _end_mark(tokenizer)
    except Exception:  # Templates can raise anything.
        return None


def _exact(tokenizer: ChatTokenizer) -> str:
    """Check that a chat that grows turn by turn has the same ids as one encoded whole. Return the problem or ""."""
    body, end = _turn(tokenizer, [_SAID, _AGAIN], [])
    chat = Chat(tokenizer, [], [_ASK])
    opened = chat.prompt_ids().tolist()
    with_body = tokenizer.encode(chat.text + body)
    if with_body[: len(opened)] != opened:
        return "the start of a turn is encoded differently after its opening than in the whole conversation"
    # A model continues from the opening, so its text is encoded after the opening and not alone.
    sampled = [*with_body[len(opened) :], *tokenizer.encode(end)]
    added = chat.extend(sampled, _SAID, [_AGAIN])
    if added is None:
        return "the template rewrites the previous turn, so there is no separator to check"
    whole = tokenizer.encode(tokenizer.render([_ASK, _SAID, _AGAIN], [], generation=True))
    if [*opened, *sampled, *added] != whole:
        return "the text appended after a turn is encoded differently than in the whole conversation"
    return ""


def _why_text(tokenizer: ChatTokenizer) -> str:
    """Return why a call is parsed as text, and what to do."""
    problem = why_not_template(tokenizer) if hasattr(tokenizer, "tools_shown_by") else None
    return "give the tokenizer a response_template" if problem is None else f"{problem}; {TO_DO}"


def _round_trip(tokenizer: ChatTokenizer) -> str:
    """Check that a call and a text are parsed back from what the template writes for them. Return the problem or ""."""
    body, _ = _turn(tokenizer, [_CALLED], TOOLS)
    read = tokenizer.parse(body, TOOLS)
    calls = [call["function"] for call in read.get("tool_calls", ())]
    if not calls:
        return f"a call is parsed as text, {body!r}; {_why_text(tokenizer)}"
    if calls != [{"name": "note", "arguments": ARGUMENTS}]:
        return f"a call is parsed back as {calls[0]}"
    said = tokenizer.parse(_turn(tokenizer, [_SAID], [])[0], [])
    if said["content"].strip() != _SAID["content"]:
        return f"the text {_SAID['content']!r} is parsed back as {said['content']!r}"
    return ""

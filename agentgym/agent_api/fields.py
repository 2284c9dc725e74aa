"""Reads fields of a request's JSON and checks their types. A RefusedError names the field that is wrong."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.agent_api.requests import RefusedError
from agentgym.config_fields import MAX_STOP_LENGTH, MAX_STOPS
from agentgym.types.json_values import UNSOUND, is_sound
from agentgym.types.messages import Message, as_object

MAX_VALUES = 1 << 18
"""Maximum number of values in a body: lists, objects, and what they contain. A limit on the body's size isn't enough,
because parsed values take far more memory than the body.
"""
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_NAME = 256
"""Maximum length, in characters, of a model name. Each event of a response repeats the name."""

_KINDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    dict: "an object",
    list: "a list",
    bool: "true or false",
}


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        RefusedError: If it isn't one, or contains too many values.
    """
    if values_at_most(body) > MAX_VALUES:
        raise RefusedError(f"the body contains more than {MAX_VALUES} values", status=413)
    try:
        read = json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise RefusedError(f"the body must be a JSON object, got {type(read).__name__}")
    if not is_sound(read):
        raise RefusedError(f"the body {UNSOUND}")
    return read


def values_at_most(body: bytes) -> int:
    """Return an upper bound on the number of values in a JSON body, without parsing it."""
    if len(body) <= MAX_VALUES:
        return len(body)
    # Once escaped backslashes and quotes are removed, every second piece between quotes is outside of all strings.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (texts := bare.count(b'"') // 2) > 2 * MAX_VALUES:  # Each value may have a name, which is a string, too.
        return texts
    return sum(piece.count(b",") + piece.count(b"[") + piece.count(b"{") for piece in bare.split(b'"')[::2])


def given(said: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return a required field, whose value must have the type `kind`.

    `where` is the path of the object that contains the field, such as "messages[0].", for errors.
    """
    if said.get(name) is None:
        raise RefusedError(f"{where}{name}: required", field=f"{where}{name}")
    return may(said, name, kind, where)


def may(said: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return an optional field, whose value must have the type `kind`, or None if it is missing or null."""
    value = said.get(name)
    if value is not None and not isinstance(value, kind):
        raise wrong(f"{where}{name}", f"must be {_KINDS[kind]}", value)
    return value


def whole(said: Mapping[str, Any], name: str) -> int | None:
    """Return an optional field, whose value must be a whole number of at least 1, or None if it is missing or null."""
    value = said.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise wrong(name, "must be a whole number of at least 1", value)
    return value


def objects(said: Mapping[str, Any], name: str, where: str = "", most: int = MAX_VALUES) -> list[dict[str, Any]]:
    """Return an optional field, a list of at most `most` objects. It is empty if the field is missing or null."""
    values: list[Any] = may(said, name, list, where) or []
    if len(values) > most:
        raise RefusedError(
            f"{where}{name}: must contain at most {most} objects, got {len(values)}", field=f"{where}{name}"
        )
    for place, value in enumerate(values):
        if not isinstance(value, dict):
            raise wrong(f"{where}{name}[{place}]", "must be an object", value)
    return values


def texts(value: Any, name: str) -> tuple[str, ...]:
    """Return the stop texts of a request. The value may be one text, a list of texts, or null for none.

    Raises:
        RefusedError: If the value is anything else, if a text is empty, too long or contains a NUL character, or if
            there are too many texts.
    """
    listed = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(text, str) and text for text in listed):
        raise wrong(name, "must be text, or a list of texts", value)
    if len(listed) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in listed):
        raise wrong(name, f"must contain at most {MAX_STOPS} texts of {MAX_STOP_LENGTH} characters", value)
    if any("\0" in text for text in listed):
        raise wrong(name, "must not contain a NUL character", value)
    return tuple(listed)


def model_name(said: Mapping[str, Any]) -> str:
    """Return the name of the requested model, from the required field "model"."""
    name: str = given(said, "model", str)
    if len(name) > MAX_NAME:
        raise wrong("model", f"must have at most {MAX_NAME} characters", name)
    return name


def parts_text(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content.

    The content may be text, null, which counts as "", or a list of parts whose type is in `kinds`. The texts of
    several parts are joined by newlines.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, "must be text or a list of parts", content)
    return "\n".join(_part_text(part, f"{where}[{place}]", kinds) for place, part in enumerate(content))


def _part_text(part: Any, where: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise wrong(where, "must be an object", part)
    if part.get("type") not in kinds:
        raise wrong(f"{where}.type", f"must be {' or '.join(kinds)} (the policy reads only text)", part.get("type"))
    text: str = given(part, "text", str, f"{where}.")
    return text


def arguments(value: Any) -> dict[str, Any] | str:
    """Return a call's arguments as an object if they are an object or its JSON, otherwise as text."""
    made = as_object(value)
    return made if isinstance(made, dict | str) else json.dumps(made)


def check_conversation(messages: Sequence[Message]) -> None:
    """Raise RefusedError if a conversation is empty or ends with an assistant message."""
    if not messages:
        raise RefusedError("messages: must not be empty", field="messages")
    if messages[-1]["role"] == "assistant":
        raise RefusedError(
            "messages: the last one must not be from the assistant, since an agent cannot begin the policy's turn",
            field="messages",
        )


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the tool's name added to each tool message, because some chat templates use the name."""
    names: dict[str, str] = {}
    made: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        name = names.get(message.get("tool_call_id", ""))
        made.append({**message, "name": name} if message["role"] == "tool" and name else message)
    return made


def wrong(field: str, must: str, value: Any) -> RefusedError:
    """Return the RefusedError for a field with a wrong value. `must` says what the value must be."""
    return RefusedError(f"{field}: {must}, got {value!r:.80}", field=field)

"""Tool calls made from what a model wrote: JSON and text values, cast to the types in the tools' schemas."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentgym.types.json_values import is_sound, members_of, whole_characters
from agentgym.types.messages import ToolCall


def raw_call(text: str) -> ToolCall:
    """Return a malformed call that keeps the model's text, for the tool message that reports the error."""
    return ToolCall(type="function", function={"name": "", "arguments": text})


def made_call(
    name: str, arguments: object, tools: Sequence[dict[str, Any]], *, call_id: object = None, text_values: bool = False
) -> ToolCall:
    """Return a call. Its arguments are cast by the tool's schema.

    Args:
        name: The tool's name, as the model wrote it.
        arguments: The arguments by name. If they are anything else, or hold a value that no tool can take, such as
            NaN, the call is malformed and keeps them as text.
        tools: The schemas of the tools.
        call_id: The call's id; anything but text that isn't empty is left out.
        text_values: Whether the values are text, as in formats with tags. If False, they are JSON values, and a string
            stays a string if the schema allows one.
    """
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            name = function["name"]  # The schema's string object, which all calls of the tool then share.
            if isinstance(arguments, dict):
                arguments = _cast(arguments, function.get("parameters"), text_values=text_values)
            break
    if not isinstance(arguments, dict) or whole_characters(name) is not name or not is_sound(arguments):
        name = whole_characters(name)
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call: ToolCall = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call_id, str) and call_id:
        call["id"] = call_id
    return call


def call_of(value: object, tools: Sequence[dict[str, Any]], *, call_id: object = None) -> ToolCall:
    """Return the call that a JSON value describes: {"name": .., "arguments": ..}. Any other value is malformed.

    Args:
        value: The value, or the text that the model wrote in its place.
        tools: The schemas of the tools.
        call_id: The call's id; anything but text that isn't empty is left out.
    """
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return made_call(value["name"], value.get("arguments"), tools, call_id=call_id)
    return raw_call(value if isinstance(value, str) else json.dumps(value))


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


_scanned = vars(json.JSONDecoder(parse_float=_finite, parse_constant=_finite, object_pairs_hook=members_of))[
    "scan_once"
]
"""Reads a JSON value at a place in a text. Calling it directly takes half as long as `json.loads`.

It rejects NaN and infinities, which aren't standard JSON, numbers that overflow to infinity, and objects that have a
name twice, of which all values but the last would be lost.
"""
_BLANKS = re.compile(r"[ \t\n\r]*+")
"""The whitespace that JSON allows around a value."""


class Scanned(NamedTuple):
    """What was found at a place that may hold a JSON value."""

    ok: bool
    """Whether there is a valid value."""
    value: Any
    end: int
    """The end of the value, or of the text that was read before it proved invalid."""


def json_at(text: str, at: int) -> Scanned:
    """Return the JSON value that begins at a place in a text.

    Args:
        text: The text.
        at: The place. Whitespace before the value is skipped.
    """
    try:
        value, end = _scanned(text, skip_blanks(text, at))
    except json.JSONDecodeError as error:
        return Scanned(False, None, max(at, error.pos))
    except StopIteration as error:
        return Scanned(False, None, max(at, error.value))
    except (ValueError, RecursionError):  # A number that is too large, a name that occurs twice, or too many levels.
        return Scanned(False, None, len(text))
    return Scanned(True, value, end)


def skip_blanks(text: str, at: int) -> int:
    """Return the place of the first character at or after `at` that isn't whitespace."""
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def joined(pieces: Sequence[str]) -> str:
    """Return the pieces of text around the calls as one content: stripped, and joined by line breaks."""
    return "\n".join([text for piece in pieces if (text := piece.strip())])


def _cast(arguments: dict[str, Any], schema: object, *, text_values: bool) -> dict[str, Any]:
    """Return the arguments with each text cast to a type that the tool's schema allows for it."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return arguments
    for key, value in arguments.items():
        if type(value) is str and key in properties:
            its = properties[key]
            if isinstance(its, dict) and its.get("type") == "string":  # The usual case.
                continue
            kinds = _kinds(its, schema)
            if text_values or "string" not in kinds:
                arguments[key] = _as_kind(value, kinds)
    return arguments


def _parts(schema: object, root: object) -> Iterator[dict[str, Any]]:
    """Yield the parts of a schema: itself, and those that its references and unions name.

    Args:
        schema: The schema of a value.
        root: The schema that contains it, in which references are looked up.
    """
    followed, pending = set[str](), [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield part
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            pending.append(_resolved(reference, root))
        for union in ("anyOf", "oneOf", "allOf"):
            choices = part.get(union)
            pending += choices if isinstance(choices, list) else ()


def _kinds(schema: object, root: object) -> set[str]:
    """Return the JSON types that a schema allows.

    Args:
        schema: The schema of a value.
        root: The schema that contains it, in which references are looked up.
    """
    kinds = set[str]()
    for part in _parts(schema, root):
        declared = part.get("type")
        kinds.update(kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
        if part.get("nullable") is True:
            kinds.add("null")
        members = part.get("enum") if "type" not in part else None
        for value in [*(members if isinstance(members, list) else ()), *([part["const"]] if "const" in part else ())]:
            kinds.add(_KIND.get(type(value), ""))
    return kinds


_KIND: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _resolved(reference: str, root: object) -> object:
    """Return the part of the root schema that a reference such as "#/$defs/Point" names; None if there is none."""
    start, *steps = reference.split("/")
    found = root if start == "#" else None
    for step in steps:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _as_kind(text: str, kinds: set[str]) -> Any:
    """Return a text as a value of one of the JSON types, or unchanged if it is none of them.

    A text that may also be a string becomes another value only if it is written exactly as JSON writes that value, or
    if it is None.
    """
    word = text.strip()
    if "string" not in kinds or word == "None":
        word = _WORDS.get(word.lower(), word)
    ok, value, end = json_at(word, 0)
    if not ok or end != len(word) or isinstance(value, str):
        return text
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value)
    kind = _KIND[type(value)]
    return value if kind in kinds or (kind == "integer" and "number" in kinds) else text


class Tags(NamedTuple):
    """A value that was written as tags, each with its name and its own value."""

    members: Sequence[tuple[str, "Tags | str"]]


def cast_tags(value: Tags | str, schema: object, root: object) -> Any:
    """Return a value that was written as text and nested tags. Texts are cast to the types in its schema.

    Tags become an object, or a list if the schema asks for one, or if it says nothing and all are named `item`.

    Args:
        value: The value.
        schema: The value's schema.
        root: The schema that contains it, in which references are looked up.

    Raises:
        ValueError: If an object has a name twice.
    """
    kinds = _kinds(schema, root)
    if isinstance(value, str):
        if not value.strip() and "string" not in kinds and (empty := kinds & {"array", "object"}):
            return [] if "array" in empty else {}
        return _as_kind(value, kinds)
    parts = list(_parts(schema, root))
    names = [name for name, _ in value.members]
    if "array" in kinds or ("object" not in kinds and {*names} == {"item"}):
        items = next((part["items"] for part in parts if "items" in part), None)
        return [cast_tags(member, items, root) for _, member in value.members]
    if len({*names}) < len(names):
        raise ValueError("an object has a name twice")
    known: dict[str, Any] = {}
    for part in parts:
        known |= part["properties"] if isinstance(part.get("properties"), dict) else {}
    return {name: cast_tags(member, known.get(name), root) for name, member in value.members}


_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""The words for JSON's constants, as templates and models write them."""

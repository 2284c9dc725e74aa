"""Parsing of typed turns: text, `/tool NAME KEY=VALUE`, or JSON."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from agentgym.config_fields import nearest
from agentgym.engines.scripted import Reply, calls, say

HELP = (
    "TEXT                        answer in plain text",
    "/tool NAME KEY=VALUE ...    call a tool; quote a value with spaces if the tool has several parameters",
    '{"name": "NAME", "arguments": {...}}    call a tool in JSON; [{...}, {...}] calls several in one turn',
    "/say TEXT                   answer in text that starts with / or {",
    "/quit                       leave; the rollout is not scored",
)
COMMANDS = ("/help", "/quit", "/say", "/tool")


class WrongTurn(Exception):
    """A line that isn't a turn; the message says what to write instead."""


def read_turn(line: str, tools: Mapping[str, Any]) -> Reply:
    """Return the turn for a line; a tool's schema determines which values are text.

    Raises:
        WrongTurn: If the command doesn't exist, the JSON is invalid, or a value has no name.
    """
    stripped = line.strip()
    command, _, rest = stripped.partition(" ")
    if command == "/tool":
        return _call(rest, tools)
    if command == "/say":
        return say(rest)
    if command.startswith("/"):
        raise WrongTurn(f"there is no {command}; {nearest(command, COMMANDS)}")
    return _in_json(stripped) if stripped[0] in "{[" else say(line)


def _call(text: str, tools: Mapping[str, Any]) -> Reply:
    parameters = tools.get(text.partition(" ")[0], {}).get("parameters", {}).get("properties", {})
    whole = _only_value(text, *parameters) if len(parameters) == 1 else None
    try:
        name, *given = shlex.split(text)
    except ValueError as error:
        if whole is not None:
            return calls(whole)
        hint = "name a tool, as in /tool look key=31" if not text.strip() else str(error)
        raise WrongTurn(f"/tool: {hint}") from None
    if whole is not None and len(given) > 1:
        return calls(whole)
    arguments: dict[str, Any] = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not equals:
            raise WrongTurn(f"/tool: {word!r} has no name; write KEY=VALUE, in quotes if it has spaces")
        arguments[key] = value if parameters.get(key, {}).get("type") == "string" else _value(value)
    return calls((name, arguments))


def _only_value(text: str, parameter: str) -> tuple[str, dict[str, str]] | None:
    """Parse `NAME PARAMETER=VALUE` with everything after "=" as the value, including spaces and quotes."""
    name, _, rest = text.partition(" ")
    key, equals, value = rest.strip().partition("=")
    return (name, {parameter: value}) if equals and key == parameter else None


def _value(text: str) -> Any:
    """Parse JSON, or return other text unchanged, since the env reports invalid arguments."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _in_json(text: str) -> Reply:
    try:
        made = json.loads(text)
    except ValueError as error:
        raise WrongTurn(f"this is not JSON ({error}); /say sends it as text") from None
    named = made if isinstance(made, list) else [made]
    if not named or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in named):
        raise WrongTurn('a call needs a "name" and its "arguments"; /say sends text')
    if not all(isinstance(one.get("arguments", {}), dict) for one in named):
        raise WrongTurn('"arguments" must be an object, as in {"key": 31}')
    return calls(*((one["name"], one.get("arguments", {})) for one in named))

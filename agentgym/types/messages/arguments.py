"""A call's arguments: objects in this library, JSON text in OpenAI's API and in many data sets."""

import json
from collections.abc import Mapping
from typing import Any

from agentgym.types.json_values import is_sound, members_of


def as_object(arguments: Any) -> Any:
    """Return arguments that are an object's JSON text as the object, and everything else unchanged.

    Blank text is an empty object. An object that not every template can write (`is_sound`), or that has a name twice,
    stays text.
    """
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        read = json.loads(arguments, object_pairs_hook=members_of)
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) and is_sound(read) else arguments


def with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have objects as arguments where they had an object's JSON text.

    A call without a name keeps its text: it is one that a model wrote wrongly.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name") or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": as_object(function["arguments"])}}

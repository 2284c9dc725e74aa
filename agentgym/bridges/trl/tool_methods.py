"""Methods made from tool schemas, since TRL reads a tool's schema from a signature and a Google-style docstring."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
"""The Python types from which TRL generates the same schemas again."""


def tool_method(name: str, schema: dict[str, Any]) -> Callable[..., str]:
    """Return a method that calls `self._call(name, arguments)`, with the schema in its signature and docstring."""

    def called(self: Any, **arguments: Any) -> str:
        answer: str = self._call(name, arguments)
        return answer

    properties: dict[str, Any] = schema["parameters"].get("properties", {})
    described = [f"    {one}: {_line(given.get('description')) or one}" for one, given in properties.items()]
    called.__doc__ = "\n".join(
        [_line(schema["description"]) or name, *(["", "Args:", *described] if described else [])]
    )
    called.__name__ = name
    required = schema["parameters"].get("required", ())
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [
        inspect.Parameter(
            one,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if one in required else None,
            annotation=_type(of),
        )
        for one, of in properties.items()
    ]
    called.__annotations__ = {one.name: one.annotation for one in given} | {"return": str}
    called.__signature__ = inspect.Signature([receiver, *given], return_annotation=str)  # type: ignore[attr-defined]
    return called


def _type(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    return _TYPES.get(str(schema.get("type")), Any)


def _line(text: Any) -> str:
    return " ".join(str(text or "").split())

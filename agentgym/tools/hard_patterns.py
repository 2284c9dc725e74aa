"""Removal of patterns that can take more than linear time, such as look-arounds, from foreign schemas."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from agentgym.tools.argument_schemas import is_linear

_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")
"""Keywords that contain schemas by name; `patternProperties` is another one, whose names are patterns."""
_VALUES = ("const", "enum", "default", "examples")
"""Keywords that contain values, not schemas."""
_EITHER_WAY = frozenset({"not", "oneOf", "if", "contains"})
"""Keywords under which a more permissive subschema can make the whole schema stricter."""


class Relaxed(NamedTuple):
    """A schema that accepts everything the original accepts, and values that only the removed patterns reject."""

    schema: dict[str, Any]
    fields: tuple[str, ...]
    """Paths of the removed patterns, as field names joined by dots; "arguments" is the top level."""
    allows_all: bool
    """Whether the schema was dropped entirely, because it also uses `not`, `oneOf`, `if` or `contains`."""


def without_hard_patterns(schema: Mapping[str, Any]) -> Relaxed:
    """Return the schema without the patterns that can't be searched for in linear time, and where they were."""
    walk = _Walk()
    relaxed = walk.relaxed(schema, "")
    fields = tuple(dict.fromkeys(walk.fields))
    allows_all = bool(fields and walk.keywords & _EITHER_WAY)
    return Relaxed({"type": "object"} if allows_all else relaxed, fields, allows_all)


class _Walk:
    """One walk through a schema, which removes hard patterns and records where they were."""

    def __init__(self) -> None:
        self.fields: list[str] = []
        self.keywords: set[str] = set()

    def relaxed(self, schema: Any, path: str) -> Any:
        """Return the schema at this path without hard patterns."""
        if isinstance(schema, list):
            return [self.relaxed(one, path) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        self.keywords.update(schema)
        kept: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "pattern" and not _is_easy(value):
                self.fields.append(path or "arguments")
            elif keyword in _VALUES:
                kept[keyword] = value
            elif keyword in (*_BY_NAME, "patternProperties") and isinstance(value, Mapping):
                kept[keyword] = self._by_name(keyword, value, path)
            else:
                kept[keyword] = self.relaxed(value, path)
        if len(kept.get("patternProperties", ())) < len(schema.get("patternProperties", ())):
            self.fields.append(path or "arguments")
            for rest in (
                "additionalProperties",
                "unevaluatedProperties",
            ):  # They'd reject names that a dropped pattern matched.
                kept.pop(rest, None)
        return kept

    def _by_name(self, keyword: str, schemas: Mapping[str, Any], path: str) -> dict[str, Any]:
        easy = {name: one for name, one in schemas.items() if keyword != "patternProperties" or _is_easy(name)}
        return {name: self.relaxed(one, f"{path}.{name}" if path else name) for name, one in easy.items()}


def _is_easy(pattern: Any) -> bool:
    return not isinstance(pattern, str) or is_linear(pattern)

"""JSON schemas of tools' arguments: checked when a tool is created, and applied in a bounded number of steps."""

import json
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any

from pydantic_core import SchemaError as PatternError, SchemaValidator, ValidationError, core_schema

from agentgym.errors.extras import needs_extra
from agentgym.tools.tool import WrongArguments

STEPS_AT_MOST = 50_000
"""Maximum number of subschemas applied to one call's arguments; a recursive `anyOf` could need any number."""
WORK_AT_MOST = 1_000_000_000
"""Maximum product of a text's length and a pattern's size; a search then takes about a second."""
SHOWN_ERRORS = 5
"""Maximum number of errors that the model reads about one call's arguments."""
SHOWN_CHARACTERS = 300
"""Maximum number of characters of one such error, because it quotes the argument, which may be long."""
_steps: ContextVar[Iterator[int]] = ContextVar("agentgym_schema_steps")
"""The steps that remain for the running check."""


@lru_cache(maxsize=1024)
def validator_of(schema: str, where: str) -> Any:
    """Return a validator for a schema in JSON text; it never fetches references over the network.

    Args:
        schema: The JSON schema, as text.
        where: How error messages name the tool.

    Raises:
        ValueError: If the schema is invalid, if it can't be applied to any arguments, or if that can't be done in
            bounded time; the message names the faulty part.
        MissingPackage: If the package `jsonschema` isn't installed.
    """
    with needs_extra():
        from jsonschema import SchemaError
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry

    loaded = json.loads(schema)
    kind: Any = validator_for(loaded, default=Draft202012Validator)
    try:
        # Of the formats, only "regex" matters, and `_look_through` checks patterns.
        kind.check_schema(loaded, format_checker=None)
    except SchemaError as error:
        raise ValueError(f"{where}: parameters: {error.message} at {error.json_path}") from error
    try:
        _look_through(loaded, kind)
    except ValueError as error:
        raise ValueError(f"{where}: parameters: {error}") from error
    return _bounded(kind)(loaded, registry=Registry())


def checked(validator: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments if they fit the schema.

    Raises:
        WrongArguments: If they don't fit, or take too long to check; the message says what is wrong.
    """
    before = _steps.set(iter(range(STEPS_AT_MOST)))
    try:
        errors = sorted(f"{_path(error)}: {_short(error.message)}" for error in validator.iter_errors(dict(arguments)))
    except RecursionError as error:
        raise WrongArguments("arguments: nested too deeply to be checked; use fewer levels of nesting") from error
    except OverflowError as error:
        raise WrongArguments(f"arguments: a number is too large to be checked ({error}); use a smaller one") from error
    finally:
        _steps.reset(before)
    if len(errors) > SHOWN_ERRORS:
        errors[SHOWN_ERRORS:] = [f"and {len(errors) - SHOWN_ERRORS} more errors"]
    if errors:
        raise WrongArguments("; ".join(errors))
    return arguments


def _path(error: Any) -> str:
    return ".".join(map(str, error.absolute_path)) or "arguments"


def _short(message: str) -> str:
    return message if len(message) <= SHOWN_CHARACTERS else f"{message[:SHOWN_CHARACTERS]} [...]"


def _look_through(root: Mapping[str, Any], kind: Any) -> None:
    """Check a schema and all its subschemas before it is used.

    Args:
        root: The schema.
        kind: The class of jsonschema's validator for the schema's version.

    Raises:
        ValueError: If a reference is missing or circular, if a pattern can't run in linear time, or if
            `unevaluatedProperties` is combined with `patternProperties`.
    """
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import specification_with

    specification = specification_with(kind.ID_OF(kind.META_SCHEMA))
    resource = specification.create_resource(root)
    waiting = [(resource, REGISTRY.resolver_with_root(resource))]
    names: dict[int, str] = {}
    same_place: dict[int, list[int]] = {}
    """Maps each schema to the subschemas that it applies to the whole value rather than to a part of it. All of them
    are given by Python's `id`.
    """
    keywords = set[str]()
    while waiting:
        resource, resolver = waiting.pop()
        schema = resource.contents
        if id(schema) in same_place or not isinstance(schema, Mapping):
            continue
        keywords.update(schema)
        same_place[id(schema)] = [id(one) for one in _applied_in_place(schema)]
        for pattern in [*schema.get("patternProperties", ()), *([schema["pattern"]] if "pattern" in schema else [])]:
            _linear(pattern)
        for keyword in {"$ref", "$dynamicRef", "$recursiveRef"} & schema.keys():
            found = _found(keyword, schema[keyword], resolver)
            names[id(schema)] = f"{keyword}: {schema[keyword]!r}"
            same_place[id(schema)].append(id(found.contents))
            waiting.append((specification.create_resource(found.contents), found.resolver))
        kept = {id(one) for key in ("$defs", "definitions") for one in schema.get(key, {}).values()}
        below = [one for one in resource.subresources() if id(one.contents) not in kept]
        waiting += [(one, resolver.in_subresource(one)) for one in below]
    try:
        TopologicalSorter(same_place).prepare()
    except CycleError as error:
        circle = [names[one] for one in error.args[1] if one in names]
        raise ValueError(f"{circle[0]} refers back to itself, so no value can match it") from error
    if {"patternProperties", "unevaluatedProperties"} <= keywords:
        raise ValueError("unevaluatedProperties: can't be combined with patternProperties; use additionalProperties")


def _applied_in_place(schema: Mapping[str, Any]) -> list[Any]:
    several = [one for key in ("allOf", "anyOf", "oneOf") for one in schema.get(key, ())]
    single = [schema[key] for key in ("not", "if", "then", "else") if key in schema]
    named = [one for key in ("dependentSchemas", "dependencies") for one in schema.get(key, {}).values()]
    return [one for one in several + single + named if isinstance(one, Mapping)]


def _found(keyword: str, ref: str, resolver: Any) -> Any:
    from referencing.exceptions import Unresolvable

    try:
        found = resolver.lookup(ref)
    except (Unresolvable, ValueError) as error:
        raise ValueError(f"{keyword}: {ref!r} does not exist in the schema; references are not fetched") from error
    if not isinstance(found.contents, Mapping | bool):
        raise ValueError(f"{keyword}: {ref!r} points to {found.contents!r:.80}, which is not a schema")
    return found


@lru_cache(maxsize=4096)
def _linear(pattern: str) -> SchemaValidator:
    """Return a linear-time validator for the pattern; Python's `re` can take forever on one argument."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern))
    except PatternError as error:
        why = str(error).splitlines()[-1].removeprefix("error: ").strip()
        raise ValueError(
            f"pattern: {pattern!r} can't be matched in linear time ({why}); rewrite it, pass `check`, or leave the "
            "tool out"
        ) from error


def is_linear(pattern: str) -> bool:
    """Return whether a text can be searched for the pattern in linear time."""
    try:
        _linear(pattern)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=4096)
def _size(pattern: str) -> int:
    """Return an upper bound on a compiled pattern's size: its length times the larger number of each `{2,9}` in it."""
    repeats = re.findall(r"\{(\d+)(?:,(\d*))?\}", pattern)
    return len(pattern) * prod(max(int(most or 0), int(least), 1) for least, most in repeats)


def _matches(pattern: str, text: str) -> bool:
    if _size(pattern) * len(text) > WORK_AT_MOST:
        raise WrongArguments(
            f"arguments: a text of {len(text)} characters is too long for the pattern {pattern!r:.80}; shorten it"
        )
    try:
        _linear(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


@cache
def _bounded(kind: Any) -> Any:
    """Return jsonschema's validator class with replacements for the keywords that take more than linear time."""
    from jsonschema.validators import extend

    usual = kind.VALIDATORS["additionalProperties"]

    def additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if (patterns := schema.get("patternProperties")) and isinstance(instance, dict):
            instance = {key: instance[key] for key in instance if not any(_matches(one, key) for one in patterns)}
            schema = {key: schema[key] for key in schema if key != "patternProperties"}
        yield from usual(validator, allowed, instance, schema)

    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": additional,
        "uniqueItems": _unique_items,
    }
    bounded = extend(kind, own)
    bounded.evolve = _step  # The usual `evolve` returns to jsonschema's own classes at a `$schema`.
    return bounded


def _step(validator: Any, **changes: Any) -> Any:
    """Return the validator with these changes, and count it as one step of the check."""
    from attrs import evolve

    if next(_steps.get(), None) is None:
        raise WrongArguments(
            f"arguments: the check needs more than {STEPS_AT_MOST:,} steps; send less data, with less nesting"
        )
    return evolve(validator, **changes)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    for pattern, below in patterns.items():
        for key in instance if isinstance(instance, dict) else ():
            if _matches(pattern, key):
                yield from validator.descend(instance[key], below, path=key, schema_path=pattern)


def _unique_items(validator: Any, unique: bool, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if unique and isinstance(instance, list) and len({_key(item) for item in instance}) < len(instance):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _key(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 equals 1.0, but not true."""
    if isinstance(value, dict):
        return (dict, frozenset((key, _key(item)) for key, item in value.items()))
    if isinstance(value, list):
        return (list, tuple(_key(item) for item in value))
    return (bool, value) if isinstance(value, bool) else value

"""The content of a task: its fields in the form that identifies it and that a store saves."""

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from agentgym.data.plain import NotPlainError, model_fields_of, plain
from agentgym.types.task import Task

TaskT = TypeVar("TaskT", bound=Task)
EXCLUDE = "write `Field(exclude=True)`, which leaves it out of the task's content and of the stored task"

BASE64 = "write `model_config = pydantic.ConfigDict(ser_json_bytes='base64', val_json_bytes='base64')` in the class"


def task_fields(task: Task) -> dict[str, Any]:
    """Return a task's fields in JSON types, equal for equal tasks in every process (see `plain`).

    Fields that pydantic excludes are left out.

    Raises:
        ValueError: If a field has no such form, for example because it is a function or a SecretStr. The message
            names the field, and says what to write instead.
    """
    try:
        fields: dict[str, Any] = model_fields_of(task, _raw, again=True)
    except NotPlainError as error:
        place = ".".join(map(str, [type(task).__name__, *error.where]))
        raise ValueError(f"{place}: {_instead(str(error), error.where)}") from error
    return fields


def _raw(value: Any) -> str | dict[str, str]:
    """Return bytes as text if they are UTF-8, and otherwise in base64, as an object that can't equal any text.

    Raises:
        NotPlainError: For any other value, such as a secret.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        raise NotPlainError(f"a {type(value).__name__}")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _instead(what: str, where: list[Any]) -> str:
    """Return a phrase that says what is wrong with a field, and what to write instead.

    `what` describes the value that has no JSON form, and `where` is the path to it, beginning with the field's name.
    """
    if "Secret" in what:
        return (
            f"{what} is written as asterisks, so two of them would look the same, and a stored task would lose its "
            f"value; write `{where[0]}: str = Field(repr=False)`, which no log shows"
        )
    if "function" in what:
        return (
            f"expected a value with the same text in every process, got {what}; keep the key that selects it, such as "
            f"its name, and look it up in the env, or {EXCLUDE}"
        )
    return (
        f"expected a value with the same text in every process, got {what}; keep the data that it is made from, or "
        f"{EXCLUDE}"
    )


def content(task: Task) -> str:
    """Return all of a task's fields except its id, as text that is the same for equal fields in every process.

    Raises:
        ValueError: As in `task_fields`.
    """
    fields = task_fields(task)
    fields.pop("id", None)
    return repr(_sorted(fields))


def key_text(value: Any) -> str:
    """Return a value of the `by` function of `split` as text that is the same in every process.

    Raises:
        ValueError: If the value has no such text.
    """
    try:
        return repr(_sorted(plain(value, _raw)))
    except NotPlainError as error:
        raise ValueError(
            f"by: expected a value with the same text in every process, got {error}; return text"
        ) from error


def _sorted(value: Any) -> Any:
    """Return the value with each object's keys sorted."""
    if isinstance(value, dict):
        return [(repr(key), _sorted(value[key])) for key in sorted(value, key=repr)]
    return [_sorted(inner) for inner in value] if isinstance(value, list) else value


def same_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two tasks have the same fields, in JSON types; NaN equals itself."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def task_of(kind: type[TaskT], fields: Mapping[str, Any]) -> TaskT:
    """Return the task with these fields in JSON types.

    A store saves fields under their names, not under their aliases; both are accepted.

    Raises:
        ValidationError: If the task type rejects the fields.
    """
    try:
        return kind.model_validate_json(json.dumps(fields), by_alias=True, by_name=True)
    except ValidationError:  # a lone surrogate, or a type that only validates Python values
        return kind.model_validate(dict(fields), by_alias=True, by_name=True)


def refuse_unkept(tasks: Iterable[Task]) -> None:
    """Raise ValueError, naming the field, if a task changes when it is read back from its stored fields.

    Rescoring the rollouts of such a task would compute their rewards from a different task. One change is allowed: a
    field that pydantic excludes and that has no default may be missing. A stored task without it is rejected when it
    is read, so it is never scored wrongly.
    """
    for task in tasks:
        _refuse_unkept(task)


def _refuse_unkept(task: Task) -> None:
    kind, fields = type(task), json.loads(json.dumps(task_fields(task)))
    try:
        back = task_of(kind, fields)
    except ValidationError as error:
        wrong = [of for of in error.errors(include_url=False) if of["loc"] and not _is_left_out(kind, of)]
        if not wrong:
            return
        loc = ".".join(map(str, wrong[0]["loc"]))
        readable = f"give it a type that pydantic can read back from its own JSON, or {EXCLUDE}"
        raise ValueError(
            f"{kind.__name__}.{loc}: can't be read back from the JSON in which tasks are stored: {wrong[0]['msg']}, "
            f"got {wrong[0]['input']!r:.60}; {BASE64 if wrong[0]['type'] == 'bytes_type' else readable}"
        ) from error
    for name, field in kind.model_fields.items():
        if (found := _difference(getattr(task, name), getattr(back, name))) is not None:
            where, was, now = found
            at = ".".join([kind.__name__, name, *where])
            raise ValueError(f"{at}: {_not_given_back(was, now, excluded=bool(field.exclude))}")


def _is_left_out(kind: type[Task], error: Mapping[str, Any]) -> bool:
    field = kind.model_fields.get(str(error["loc"][0]))
    return error["type"] == "missing" and len(error["loc"]) == 1 and field is not None and bool(field.exclude)


def _not_given_back(was: Any, now: Any, *, excluded: bool) -> str:
    """Return a phrase that says how a field changes when it is read back, and what to write instead.

    `was` is the value in the task, and `now` the one that was read back. `excluded` says whether pydantic excludes
    the field.
    """
    if excluded:
        return (
            "it is excluded, so a stored task has its default, which is a different value; give it no default, or "
            "compute it from the other fields in a property"
        )
    came = f"a stored task has {now!r:.60}, but this task has {was!r:.60}"
    if isinstance(was, bytes):
        return f"{came}; {BASE64}"
    return f"{came}; give it a type that states its content, such as set[str] instead of Any, or {EXCLUDE}"


_Difference: TypeAlias = tuple[list[str], Any, Any]
"""The path to a difference between two values, and the parts of both at that path."""


def _difference(one: Any, other: Any) -> _Difference | None:
    """Return the first difference between two values, in value or in type, or None if they are equal."""
    if type(one) is type(other) and isinstance(one, BaseModel):
        return _first({n: (getattr(one, n), getattr(other, n)) for n in type(one).model_fields})
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return _first({str(key): (one[key], other[key]) for key in one})
    if type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        return _first({str(place): pair for place, pair in enumerate(zip(one, other, strict=True))})
    return None if _is_equal(one, other) else ([], one, other)


def _first(pairs: Mapping[str, tuple[Any, Any]]) -> _Difference | None:
    for name, (one, other) in pairs.items():
        if (found := _difference(one, other)) is not None:
            return [name, *found[0]], found[1], found[2]
    return None


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    try:
        return bool(one == other) or bool(one != one and other != other)  # both are NaN
    except Exception:  # they can't be compared
        return False

"""A unique JSON form of Python values, for the results of tools and the fields of tasks."""

import dataclasses
import json
import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, Set, ValuesView
from enum import Enum
from functools import partial
from inspect import isroutine
from typing import Any, TypeAlias

import numpy as np
from pydantic import BaseModel, RootModel, Secret, SecretBytes, SecretStr
from pydantic_core import to_jsonable_python

Raw: TypeAlias = Callable[[Any], Any]
"""Converts bytes and pydantic's secrets, which have no JSON form, and raises for those that it rejects."""
_SCALARS = frozenset({str, int, float, bool, type(None)})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_TABLES = ("iloc", "to_dicts", "to_pylist", "to_list", "num_rows")
"""Attributes of which each table of pandas, polars, Arrow or `datasets` has at least one."""


_LISTED = (np.generic, np.ndarray, KeysView, ItemsView, ValuesView)
"""Types that pydantic can't serialize, and that `plain` writes as numbers and lists."""


class NotPlainError(TypeError):
    """Raised for a value without a JSON form.

    `where` is the path of keys and indices to the value, from the value that was passed to `plain`.
    """

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.where: list[Any] = []


def plain(value: Any, raw: Raw) -> Any:
    """Return the value in JSON types. Equal values give equal results, in every process.

    A set becomes a sorted list, and an Enum becomes its value. NumPy's numbers and arrays become numbers and lists. A
    dataclass, a NamedTuple or a pydantic model becomes an object of its fields. A date, a Decimal, a UUID or a path
    becomes the text that pydantic writes for it. Any other object becomes its text.

    Args:
        value: Any value.
        raw: Converts bytes and secrets.

    Raises:
        NotPlainError: For a function, an object whose text is its memory address, a table whose text form omits rows,
            a key that is not text, and anything that `raw` rejects.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list or kind is tuple:
        return list(value) if _SCALARS.issuperset(map(type, value)) else _items(value, raw)
    return _object(value, raw) if isinstance(value, Mapping) else _other(value, raw)


def model_fields_of(model: BaseModel, raw: Raw, *, again: bool = False) -> Any:
    """Return a model as pydantic writes it in JSON, except that sets are sorted and non-finite numbers stay numbers.

    With `again`, the result can be read back as the model, so computed fields are left out.

    Raises:
        NotPlainError: As in `plain`, and for bytes and secrets that the model's own serializers don't write, if `raw`
            rejects them.
    """
    try:
        dumped = model.model_dump(
            mode="json", round_trip=again, warnings=False, fallback=lambda value: plain(value, raw)
        )
    except Exception:  # pydantic doesn't say whose value it was, so convert one field at a time
        named = {**type(model).model_fields}
        kept = {name: getattr(model, name) for name, field in named.items() if not field.exclude}
        return _object(kept | (model.model_extra or {}), raw)
    return _mended(model, dumped, raw)


def _items(values: Iterable[Any], raw: Raw) -> list[Any]:
    return [_under(place, value, raw) for place, value in enumerate(values)]


def _object(value: Mapping[Any, Any], raw: Raw) -> dict[str, Any]:
    return {_key(key, raw): _under(key, inner, raw) for key, inner in value.items()}


def _under(key: Any, value: Any, raw: Raw) -> Any:
    if type(value) in _SCALARS:
        return value
    try:
        return plain(value, raw)
    except NotPlainError as error:
        error.where.insert(0, key)
        raise


def _key(key: Any, raw: Raw) -> str:
    """Return a mapping's key as text, with numbers written as Python's `json` writes them."""
    if isinstance(made := key if type(key) is str else plain(key, raw), str):
        return made
    if made is None or isinstance(made, bool | int | float):
        return json.dumps(made)
    raise NotPlainError(f"an object key of type {type(key).__name__}")


def _other(value: Any, raw: Raw) -> Any:
    if isinstance(value, Enum):
        return plain(value.value, raw)
    if isinstance(value, np.generic | np.ndarray):
        # Times as text, because numpy returns integers for nanoseconds.
        listed = (value.astype(str) if value.dtype.kind in "mM" else value).tolist()
        return listed if value.dtype.kind in "biufU" else plain(listed, raw)
    for kind in (str, int, float):  # subclasses of these
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, bytes | bytearray | memoryview | SecretStr | SecretBytes | Secret):
        return raw(value)
    if isinstance(value, BaseModel):
        return model_fields_of(value, raw)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _object({of.name: getattr(value, of.name) for of in dataclasses.fields(value)}, raw)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _object(value._asdict(), raw)
    return _many_or_one(value, raw)


def _many_or_one(value: Any, raw: Raw) -> Any:
    if any(hasattr(value, name) for name in _TABLES) and not isinstance(value, type):
        raise NotPlainError(f"a {type(value).__name__}, whose text form omits rows; give its rows as a list of dicts")
    if isinstance(value, Set) and not isinstance(value, KeysView | ItemsView):
        return in_order(_items(value, raw))
    if isinstance(value, Sequence | KeysView | ValuesView | ItemsView):
        return _items(value, raw)
    if _is_tensor(value):
        return plain(value.tolist(), raw)
    return _leaf(value)


def _is_tensor(value: Any) -> bool:
    is_table = any(hasattr(value, name) for name in _TABLES)
    return hasattr(value, "tolist") and hasattr(value, "shape") and not is_table and not isinstance(value, type)


def _leaf(value: Any) -> Any:
    if isroutine(value) or isinstance(value, partial):
        raise NotPlainError("a function")
    text = str(value)
    if _ADDRESS.search(text):
        saves = "; return ag.Image.from_pil(...) of it" if callable(getattr(value, "save", None)) else ""
        raise NotPlainError(f"a {type(value).__name__}{saves}")
    try:
        return to_jsonable_python(value)
    except ValueError:  # not a type that pydantic knows
        return text


def in_order(items: list[Any]) -> list[Any]:
    """Return a set's items in a fixed order: numbers or texts sorted, anything else sorted by its JSON."""
    kinds = set(map(type, items))
    return sorted(items) if kinds in ({str}, {int}) else sorted(items, key=lambda one: json.dumps(one, sort_keys=True))


def _mended(value: Any, dumped: Any, raw: Raw) -> Any:
    """Return `dumped`, which is pydantic's output for `value`, with some parts replaced.

    Numbers that aren't finite are restored, and sets are sorted. Secrets that pydantic wrote as asterisks are passed
    to `raw`.
    """
    if type(value) in (str, int, bool, type(None)):
        return dumped
    if isinstance(value, float) and dumped is None:  # not finite
        return float(value)
    if isinstance(value, SecretStr | SecretBytes | Secret):
        return dumped if str(dumped).strip("b'*") else raw(value)  # its own serializer may write it
    if isinstance(value, RootModel):
        return _mended(value.root, dumped, raw)
    if isinstance(value, _LISTED) or _is_tensor(value):  # pydantic called `plain` for it
        return _mended(plain(value, raw), dumped, raw)
    if isinstance(dumped, dict):
        return _mended_object(value, dumped, raw)
    if isinstance(dumped, list) and isinstance(value, Set | Sequence) and len(value) == len(dumped):
        items = [_mended_under(place, *pair, raw) for place, pair in enumerate(zip(value, dumped, strict=True))]
        return in_order(items) if isinstance(value, Set) else items
    return dumped


def _mended_object(value: Any, dumped: dict[str, Any], raw: Raw) -> dict[str, Any]:
    if isinstance(value, Mapping) and len(value) == len(dumped):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        inner = [getattr(value, name, written) for name, written in dumped.items()]
    else:
        return dumped
    pairs = zip(dumped.items(), inner, strict=True)
    return {name: _mended_under(name, of, written, raw) for (name, written), of in pairs}


def _mended_under(key: Any, value: Any, dumped: Any, raw: Raw) -> Any:
    try:
        return _mended(value, dumped, raw)
    except NotPlainError as error:
        error.where.insert(0, key)
        raise

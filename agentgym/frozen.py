"""What frozen types are built with: their laws, and their read-only vectors."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_DTYPES = {kind: np.dtype(kind) for kind in (np.int64, np.float32, np.bool_)}
"""The usual ones, of which numpy has one object each: it is compared at a third of the cost."""


def _vector(name: str, value: ArrayLike, dtype: Any) -> NDArray[Any]:
    """A read-only vector of `dtype`; no copy where the value already is one."""
    if type(value) is np.ndarray and (value.dtype is _DTYPES.get(dtype) or value.dtype == dtype):
        array = value
    else:
        array = np.asarray(value, dtype=dtype)
        cut = dtype is np.int64 and array.size > 0 and np.asarray(value).dtype.kind == "f"
        require(not cut, f"{name}: must be whole numbers, got floats")
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def set_vectors(obj: object, **dtypes: Any) -> None:
    """Make these fields of a frozen dataclass read-only vectors, while it is being built."""
    for name, dtype in dtypes.items():
        value = getattr(obj, name)
        array = _vector(name, value, dtype)
        if array is not value:
            object.__setattr__(obj, name, array)


def set_pair(obj: Any, one: str, one_type: Any, other: str, other_type: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Do what `set_vectors` does for two fields, at half of its cost, and return the vectors."""
    given, other_given = getattr(obj, one), getattr(obj, other)
    made, other_made = _vector(one, given, one_type), _vector(other, other_given, other_type)
    if made is not given:
        object.__setattr__(obj, one, made)
    if other_made is not other_given:
        object.__setattr__(obj, other, other_made)
    return made, other_made


def require(law: bool, message: str) -> None:
    if not law:
        raise ValueError(message)

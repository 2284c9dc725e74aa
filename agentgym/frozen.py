"""What frozen types are built with: their laws, and their read-only vectors."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Bools: TypeAlias = NDArray[np.bool_]

_DTYPES = {kind: np.dtype(kind) for kind in (np.int64, np.float32, np.bool_)}
"""The usual ones, of which numpy has one object each: it is compared at a third of the cost."""


def vector(name: str, value: ArrayLike, dtype: Any) -> NDArray[Any]:
    """A read-only vector of `dtype`; no copy where the value already is one."""
    if type(value) is np.ndarray and (value.dtype is _DTYPES.get(dtype) or value.dtype == dtype):
        array = value
    else:
        array = np.asarray(value, dtype=dtype)
        cut = dtype is np.int64 and array.size > 0 and np.asarray(value).dtype.kind == "f"
        require(not cut, f"{name}: must be whole numbers, got floats")
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array


def set_vectors(obj: object, **dtypes: Any) -> None:
    """Make these fields of a frozen dataclass read-only vectors, while it is being built."""
    for name, dtype in dtypes.items():
        value = getattr(obj, name)
        if type(value) is np.ndarray and value.dtype is _DTYPES.get(dtype) and not value.flags.writeable:
            continue
        array = vector(name, value, dtype)
        if array is not value:
            object.__setattr__(obj, name, array)


def require(law: bool, message: str) -> None:
    if not law:
        raise ValueError(message)


def require_rising(name: str, starts: Sequence[int]) -> None:
    if not starts or starts[0] != 0 or list(starts) != sorted(set(starts)):
        raise ValueError(f"{name}: starts must rise from 0")

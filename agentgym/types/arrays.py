"""Validation helpers and read-only vectors for frozen types."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Bools: TypeAlias = NDArray[np.bool_]

_DTYPES = {kind: np.dtype(kind) for kind in (np.int64, np.float32, np.bool_)}
"""The NumPy dtype of each usual type. NumPy has only one object for each, and `is` takes a third of `==`'s time."""


_KINDS = {
    np.int64: ("iu", "whole numbers"),
    np.float32: ("fiu", "numbers"),
    np.bool_: ("biu", "true or false"),
}
"""For each type, the kind codes of the NumPy values that are accepted for it, and what messages call such values.
NumPy alone would also parse text and dates.
"""
ID_BITS = 31
"""Maximum number of bits of a token id, which must fit the int32 arrays of a trainer."""


def vector(name: str, value: ArrayLike, dtype: Any) -> NDArray[Any]:
    """Return a read-only vector of `dtype`, without a copy if the value already has it.

    Raises:
        ValueError: If the value isn't a vector of such numbers; the message starts with `name`.
    """
    if type(value) is np.ndarray and (value.dtype is _DTYPES.get(dtype) or value.dtype == dtype):
        array = value
    else:
        array = _converted(name, value, dtype)
    if array.ndim != 1:
        raise ValueError(f"{name}: must be a vector, got shape {array.shape}")
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array


def _converted(name: str, value: ArrayLike, dtype: Any) -> NDArray[Any]:
    kinds, what = _KINDS[dtype]
    try:
        given = np.asarray(value)
    except ValueError:  # Rows of different lengths.
        raise ValueError(f"{name}: must be a vector of {what}, got rows of different lengths") from None
    got = f"{name}: must be {what}, got"
    require(
        given.dtype.kind in kinds or not given.size, f"{got} {'floats' if given.dtype.kind == 'f' else given.dtype}"
    )
    if given.dtype == np.uint64 and dtype is np.int64:
        require(not given.size or int(given.max()) < 1 << 63, f"{got} one that doesn't fit int64")
    with np.errstate(over="ignore"):  # Too large values become infinite, and are rejected later.
        return given.astype(dtype, copy=False)


def require_ids(name: str, ids: Ints) -> None:
    """Check that all ids are from 0 to 2^31 - 1; otherwise raise a ValueError with `name` and the first invalid id."""
    # One pass, at half the cost of minimum and maximum: the union has each bit that any id has, including the sign
    # bit.
    if np.bitwise_or.reduce(ids) >> ID_BITS:
        where = int(np.flatnonzero(ids >> ID_BITS)[0])
        raise ValueError(f"{name}: id {ids[where]} at position {where} is not in 0..{(1 << ID_BITS) - 1}")


def set_vectors(obj: object, **dtypes: Any) -> None:
    """Replace fields of a frozen dataclass by read-only vectors, while the object is being constructed.

    Args:
        obj: The object.
        dtypes: The type of the vector for each field, by the field's name.

    Raises:
        ValueError: If a field isn't a vector of such numbers; the message starts with the field's name.
    """
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
        raise ValueError(f"{name}: starts must increase from 0")

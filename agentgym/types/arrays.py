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


_KINDS = {
    np.int64: ("iu", "whole numbers"),
    np.float32: ("fiu", "numbers"),
    np.bool_: ("biu", "true or false"),
}
"""The kinds of arrays that are taken for each type, in numpy's letters: numpy alone would also read text and dates."""
ID_BITS = 31
"""Bits of a token id: as many as fit the int32 that a trainer lays ids out in."""


def vector(name: str, value: ArrayLike, dtype: Any) -> NDArray[Any]:
    """A read-only vector of `dtype`; no copy where the value already is one. ValueError with the name for another."""
    if type(value) is np.ndarray and (value.dtype is _DTYPES.get(dtype) or value.dtype == dtype):
        array = value
    else:
        array = _converted(name, value, dtype)
    if array.ndim != 1:
        raise ValueError(f"{name}: must be a vector, got the shape {array.shape}")
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array


def _converted(name: str, value: ArrayLike, dtype: Any) -> NDArray[Any]:
    kinds, what = _KINDS[dtype]
    try:
        given = np.asarray(value)
    except ValueError:  # Rows of several lengths.
        raise ValueError(f"{name}: must be a vector of {what}, got rows of several lengths") from None
    got = f"{name}: must be {what}, got"
    require(
        given.dtype.kind in kinds or not given.size, f"{got} {'floats' if given.dtype.kind == 'f' else given.dtype}"
    )
    if given.dtype == np.uint64 and dtype is np.int64:
        require(not given.size or int(given.max()) < 1 << 63, f"{got} one that int64 cannot hold")
    with np.errstate(over="ignore"):  # What is too large for float32 becomes infinite, which is no log-probability.
        return given.astype(dtype, copy=False)


def require_ids(name: str, ids: Ints) -> None:
    """Raise ValueError, with the first bad one, unless all are token ids: whole numbers of 0 to 2^31 - 1."""
    # One pass at half the cost of a minimum and a maximum: the sign and the high bits of any id are those of the union.
    if np.bitwise_or.reduce(ids) >> ID_BITS:
        where = int(np.flatnonzero(ids >> ID_BITS)[0])
        raise ValueError(f"{name}: id {ids[where]} at position {where} is not in 0..{(1 << ID_BITS) - 1}")


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

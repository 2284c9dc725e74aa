"""The prefix that rows of a decode step begin with alike: its keys and values are read once for all of a group.

::

    row 0   P P P P P a b        P Q  the columns that are shared: read from row 0 for rows 0 and 2, from row 1 for it
    row 1   Q Q Q Q Q c          alone
    row 2   P P P P P d e f      a .. each row's own: its prompt's rest, and what it has sampled

Attention over one query a row is bound by reading keys and values, and rollouts of one task have one prompt.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.types.arrays import Ints

_WORTH = 2048
"""Columns that must be spared in a step: sharing costs some small operations in each layer."""


class RowGroups(NamedTuple):
    """Rows by the `length` ids that they begin with; numbers are of rows in the step."""

    length: int
    leaders: Ints
    """One row of each group."""
    members: Ints
    """[groups, most rows of a group]; a smaller group repeats its leader."""
    places: Ints
    """Where each row stands among the members, counted through."""


def groups(ids: Ints, weights: Ints) -> RowGroups | None:
    """Group rows by what they share of `ids` [rows, columns] under the same weights; None where that spares little.

    All groups share the same number of columns: that which spares the most reading.
    """
    rows, limit = ids.shape
    if (rows - 1) * limit < _WORTH:
        return None
    keys = [row.tobytes() for row in np.column_stack([weights, ids])]
    order = np.array(sorted(range(rows), key=keys.__getitem__))
    differs = ids[order[1:]] != ids[order[:-1]]
    common = np.where(differs.any(1), differs.argmax(1), limit)
    common[weights[order[1:]] != weights[order[:-1]]] = 0
    lengths = np.unique(common)
    spared = lengths * (rows - 1 - (common < lengths[:, None]).sum(1))
    best = int(spared.argmax())
    if spared[best] < _WORTH:
        return None
    return _grouped(int(lengths[best]), order, np.append(True, common < lengths[best]))


def _grouped(length: int, order: Ints, begins: NDArray[np.bool_]) -> RowGroups:
    """Groups of rows in this order, where some of them begin a new one."""
    group = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    place = np.arange(len(order)) - first[group]
    members = np.repeat(order[first][:, None], int(place.max()) + 1, axis=1)
    members[group, place] = order
    places = np.empty_like(order)
    places[order] = group * members.shape[1] + place
    return RowGroups(length, order[first], members, places)


class Prefix:
    """A step's groups on the device of its keys and values."""

    def __init__(self, groups: RowGroups, at: Ints, rows: int, device: torch.device) -> None:
        """Take the groups of rows that stand at `at` among the `rows` of the keys and values."""
        places = np.zeros(rows, np.int64)
        places[at] = groups.places
        self.length = groups.length
        self._shape = groups.members.shape
        self._leaders = torch.from_numpy(at[groups.leaders]).to(device)
        self._members = torch.from_numpy(at[groups.members.ravel()]).to(device)
        self._places = torch.from_numpy(places).to(device)

    def read(self, kept: Tensor) -> Tensor:
        """Each group's keys or values [groups x heads, length, dim], of all rows' [rows, heads, columns, dim]."""
        return kept[:, :, : self.length].index_select(0, self._leaders).flatten(0, 1)

    def gather(self, rows: Tensor) -> Tensor:
        """[groups x heads, most x queries, ..] of each row's [rows, heads, queries, ..]."""
        heads, queries, size = rows.shape[1:]
        members = rows.index_select(0, self._members).view(*self._shape, heads, queries, size)
        return members.transpose(1, 2).reshape(-1, self._shape[1] * queries, size)

    def spread(self, groups: Tensor, heads: int) -> Tensor:
        """[rows, heads, queries, ..] of what `gather` returned the shape of."""
        most = self._shape[1]
        members = groups.view(self._shape[0], heads, most, -1, groups.shape[-1]).transpose(1, 2).flatten(0, 1)
        return members.index_select(0, self._places)

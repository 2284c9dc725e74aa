"""Prefixes that rows of a decode step share. The keys and values of such a prefix are read once for all its rows.

::

    row 0   P P P P P a b        P Q  shared columns: row 0's are read for rows 0 and 2, row 1's for row 1 alone
    row 1   Q Q Q Q Q c
    row 2   P P P P P d e f      a .. each row's own columns: the rest of its prompt, and its sampled ids

This saves time, because with one query per row, attention spends most of its time on reading keys and values. The
rollouts of one task share a prompt.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.types.arrays import Ints

_WORTH = 2048
"""Minimum number of columns of keys and values whose reading must be saved per step. With fewer, rows aren't grouped,
because grouping costs some small operations in each layer.
"""


class RowGroups(NamedTuple):
    """Rows grouped by their first `length` ids. A row's number is its index within the step."""

    length: int
    leaders: Ints
    """For each group, one row whose keys and values of the prefix are read."""
    members: Ints
    """The rows of each group, as [groups, rows of the largest group]. Smaller groups are padded with their `leaders`
    row.
    """
    places: Ints
    """For each row, its index in the flattened `members`."""


def groups(ids: Ints, weights: Ints) -> RowGroups | None:
    """Group rows by a prefix of ids that they share, and whose KV was computed under the same weights.

    Args:
        ids: The rows' ids, [rows, columns].
        weights: For each row, a number that stands for the weights that its KV was computed under.

    Returns:
        The groups. All have the same prefix length, which is the one that saves the most reading. None if even that
        saves too little.
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
    """Build the groups from rows that are sorted by group.

    `order` lists the rows. `begins` is true for each row of `order` that starts a new group.
    """
    group = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    place = np.arange(len(order)) - first[group]
    members = np.repeat(order[first][:, None], int(place.max()) + 1, axis=1)
    members[group, place] = order
    places = np.empty_like(order)
    places[order] = group * members.shape[1] + place
    return RowGroups(length, order[first], members, places)


class Prefix:
    """A step's groups of rows, as tensors on the device of the keys and values.

    In the shapes below, `most` is the number of rows in the largest group.
    """

    def __init__(self, groups: RowGroups, at: Ints, rows: int, device: torch.device) -> None:
        """Convert the groups to tensors.

        Args:
            groups: The groups, whose rows are numbered within the step.
            at: Index of each of these rows in the keys and values.
            rows: Number of rows in the keys and values.
            device: Device of the keys and values.
        """
        places = np.zeros(rows, np.int64)
        places[at] = groups.places
        self.length = groups.length
        self._shape = groups.members.shape
        self._leaders = torch.from_numpy(at[groups.leaders]).to(device)
        self._members = torch.from_numpy(at[groups.members.ravel()]).to(device)
        self._places = torch.from_numpy(places).to(device)

    def read(self, kept: Tensor) -> Tensor:
        """Return the keys or the values of each group's shared prefix, [groups x heads, length, dim].

        They are read from `kept`, the keys or values of all rows: [rows, heads, columns, dim].
        """
        return kept[:, :, : self.length].index_select(0, self._leaders).flatten(0, 1)

    def gather(self, rows: Tensor) -> Tensor:
        """Arrange all rows' queries, [rows, heads, queries, ..], by group: [groups x heads, most x queries, ..]."""
        heads, queries, size = rows.shape[1:]
        members = rows.index_select(0, self._members).view(*self._shape, heads, queries, size)
        return members.transpose(1, 2).reshape(-1, self._shape[1] * queries, size)

    def spread(self, groups: Tensor, heads: int) -> Tensor:
        """Undo `gather`: arrange [groups x heads, most x queries, ..] by row, as [rows, heads, queries, ..]."""
        most = self._shape[1]
        members = groups.view(self._shape[0], heads, most, -1, groups.shape[-1]).transpose(1, 2).flatten(0, 1)
        return members.index_select(0, self._places)

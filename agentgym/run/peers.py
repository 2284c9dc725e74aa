"""The protocol of a process that shares a run's work with other processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


class Peers(Protocol):
    """This process's position among those that share the work, and a way to gather objects from all of them.

    An open `Trainer` is one, for the processes that torchrun started.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def world(self) -> int:
        """The number of processes."""
        ...

    @property
    def gpus(self) -> Sequence[int]:
        """The GPUs of this machine that the processes train on. Servers launched on this machine use other GPUs."""
        ...

    async def gather(self, objects: list[T]) -> list[T]:
        """Return all processes' objects in rank order, on every process. Every process must call it."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """One process's share of some work; another process combines the results of all shares.

    `gather` therefore returns only this process's objects.
    """

    rank: int = 0
    world: int = 1

    @property
    def gpus(self) -> Sequence[int]:
        """Empty, because the process doesn't train."""
        return ()

    async def gather(self, objects: list[T]) -> list[T]:
        """Return this process's objects."""
        return objects

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of this share: every `world`-th one, starting at position `rank`."""
        return items[self.rank :: self.world]

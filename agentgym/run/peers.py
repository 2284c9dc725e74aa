"""The processes that share a run's work, as each of them sees the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


class Peers(Protocol):
    """The place of this process among those that share the work, and the way to what all of them hold.

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
        """The GPUs of this machine that the processes train on; servers that are launched here take others."""
        ...

    async def gather(self, objects: list[T]) -> list[T]:
        """Return all processes' objects in the order of their ranks, on every process. Every process must call it."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """One process's share of the work, where somebody else joins the shares: `gather` gives its own objects alone."""

    rank: int = 0
    world: int = 1

    @property
    def gpus(self) -> Sequence[int]:
        """None: who has a share alone does not train."""
        return ()

    async def gather(self, objects: list[T]) -> list[T]:
        """Return the objects of this process."""
        return objects

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of this share."""
        return items[self.rank :: self.world]

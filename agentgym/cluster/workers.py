"""The rollout workers of a run on Ray, which are called together and replaced if they are lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from agentgym.cluster.worker import EngineFacts
from agentgym.errors import AgentGymError
from agentgym.run.cluster_config import SANDBOX
from agentgym.run.lost import Losses, WorkersLost

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
PLACE_S = 120.0
"""Timeout in seconds for the cluster to make room for the run's actors."""
CLOSE_S = 30.0
"""Seconds for a worker to stop its rollouts and sandboxes before its process is killed."""


Renew: TypeAlias = Callable[[int, Any], Awaitable[None]]


class Start(Protocol):
    """Starts the worker of one share on the cluster."""

    def __call__(self, rank: int, world: int) -> Any: ...


@dataclass(slots=True, eq=False)
class Workers:
    """Rollout workers by rank. A lost worker is replaced, and the replacement reruns its share."""

    start: Start
    restarts: int
    losses: Losses
    """Counts workers that terminated unexpectedly, and their replacements."""
    kind: Literal["workers", "eval_workers"] = "workers"
    """The workers' name in the counts of lost processes."""
    facts: EngineFacts | None = None
    lost: int = 0
    """Number of workers that terminated unexpectedly since `open`; at most `restarts` are replaced."""
    handles: list[Any] = field(default_factory=list)
    renew_policy: Renew | None = None
    """Sends a new worker the run's current policy, before any other call."""
    renew_schedule: Renew | None = None
    """Restores the lost worker's sampler state in a new worker, after `renew_policy`."""
    _replacing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        """What messages call one of these workers."""
        return "rollout worker" if self.kind == "workers" else "evaluation worker"

    async def open(self, world: int) -> None:
        """Start and open `world` workers, and replace any that are lost meanwhile."""
        self.handles = [self.start(rank, world) for rank in range(world)]
        await self._placed(self.handles)
        facts = await self.ask_all("open")
        if len(set(facts)) > 1:
            raise AgentGymError(f"engine: the workers' engines differ: {sorted(set(map(str, facts)))}")
        self.facts = facts[0]

    async def resize(self, world: int) -> None:
        """Replace all workers with `world` new ones, each with the run's current policy."""
        _LOG.warning("the run continues with %d rollout workers instead of %d", world, len(self.handles))
        await self.close()
        await self.open(world)
        if self.renew_policy is not None:
            for rank, handle in enumerate(list(self.handles)):
                try:
                    await self.renew_policy(rank, handle)
                except RayActorError as error:
                    await self.replace(rank, handle, error)

    async def close(self) -> None:
        """Close all workers and terminate their processes."""
        handles, self.handles = self.handles, []
        closing = [asyncio.wrap_future(handle.close.remote().future()) for handle in handles]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for each in closing:
            if each.done() and not each.cancelled() and (error := each.exception()) is not None:
                _LOG.warning("a rollout worker did not close: %s", str(error).splitlines()[-1])
        for handle in handles:
            ray.kill(handle)

    async def _placed(self, handles: Sequence[Any]) -> None:
        """Wait until each process either runs or has ended.

        Raises:
            AgentGymError: If the cluster has no room for them in time.
        """
        try:
            await asyncio.wait_for(together([_started(handle) for handle in handles]), PLACE_S)
        except TimeoutError:
            raise no_room(f"{len(handles)} rollout workers") from None

    async def ask(self, rank: int, method: str, *values: Any) -> Any:
        """Call a worker's method and return its result. If the worker is lost meanwhile, call its replacement."""
        while True:
            handle = self.handles[rank]
            try:
                return await answer(getattr(handle, method).remote(*values))
            except RayActorError as error:
                await self.replace(rank, handle, error)

    async def ask_all(self, method: str, *values: Any) -> list[Any]:
        """Call a method of all workers and return the results by rank."""
        return await together([self.ask(rank, method, *values) for rank in range(len(self.handles))])

    async def replace(self, rank: int, handle: Any, error: Exception) -> None:
        """Start a replacement for a worker that has ended, unless it was already replaced.

        Raises:
            WorkersLost: If more than `restarts` workers have ended.
        """
        async with self._replacing:
            if self.handles[rank] is not handle:
                return
            said = str(error).splitlines()[0]
            self.lost += 1
            self.losses.count(f"{self.kind}_lost")
            if self.lost > self.restarts:
                raise WorkersLost(
                    f"cluster.restarts: {self.lost} {self.name}s have ended, but only {self.restarts} may be "
                    f"replaced; the last error: {said}"
                ) from error
            _LOG.warning("%s %d of %d has ended; replacing it: %s", self.name, rank, len(self.handles), said)
            fresh = self.start(rank, len(self.handles))
            try:
                await self._placed([fresh])
                await answer(fresh.open.remote())
                for renew in filter(None, (self.renew_policy, self.renew_schedule)):
                    await renew(rank, fresh)
            except RayActorError as again:
                self.handles[rank] = fresh
                last = str(again).splitlines()[0]
                _LOG.warning("the new %s %d of %d has ended, too: %s", self.name, rank, len(self.handles), last)
                return  # the next call to the replacement notices and counts this
            self.handles[rank] = fresh
            self.losses.count(f"{self.kind}_replaced")


async def _started(handle: Any) -> None:
    """Wait until an actor's process runs or has ended.

    No error is raised if it has ended; the next call to the actor then raises one.
    """
    with suppress(RayActorError):
        await answer(handle.__ray_ready__.remote())


def no_room(wanted: str) -> AgentGymError:
    """Return an error that reports that the cluster has no room for `wanted`, and how to change that."""
    there = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU", SANDBOX)}
    return AgentGymError(
        f"cluster: there was no room for {wanted} within {PLACE_S:g} s; the cluster has {there or 'nothing'}. Lower "
        "cluster.workers, cluster.trainers or the CPUs of each, or add nodes"
    )


async def answer(asked: Any) -> Any:
    """Wait for a result. An error in the worker's code is raised as the worker raised it."""
    try:
        return await asked
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


async def answers(asked: Sequence[Any]) -> list[Any]:
    """Wait for all results, or until the first error."""
    return await together([answer(each) for each in asked])


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at once, and return their results in order.

    The first error cancels the rest and is raised unwrapped.
    """
    try:
        async with asyncio.TaskGroup() as doing:
            tasks = [doing.create_task(each) for each in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]

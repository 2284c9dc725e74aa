"""Tasks, envs and engines that the scheduler's tests share."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.scheduling.accounting import BatchStats, Groups
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.types.completion import Completion


def task(number: int) -> ag.Task:
    return ag.Task(id=f"t{number}", prompt=(ag.Message(role="user", content=f"Say {number}."),))


def tasks(count: int = 1 << 20) -> Iterator[ag.Task]:
    return map(task, range(count))


class Say(ag.ToolEnv[ag.Task]):
    """An env whose reward is the number that the model says."""

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    async def said(self) -> float:
        return float(self.answer or 0)


class Held(Scripted):
    """An engine that plays a script in every rollout.

    It holds the turns for which `holds` is true until `let` is set.
    """

    def __init__(self, holds: Callable[[str, int], bool], *replies: ag.Message) -> None:
        super().__init__(replies or (say("1"),))
        self.holds, self.let = holds, asyncio.Event()
        self.held: set[str] = set()
        self.cancelled: set[str] = set()

    async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
        rollout_id = session.rpartition("/")[0]
        if self.holds(rollout_id, self._played.get(rollout_id, 0)):
            self.held.add(rollout_id)
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                self.cancelled.add(rollout_id)
                raise
            finally:
                self.held.discard(rollout_id)
        return await super().generate(token_ids, session=session, **given)


def ids(groups: Groups) -> list[str]:
    return [group.group_id for group in groups]


def batch_stats(groups: Groups) -> BatchStats:
    assert groups.batch_stats is not None
    return groups.batch_stats


def cut(**settings: Any) -> OversampleConfig:
    return OversampleConfig(**{"stop": "target", **settings})


async def settle() -> None:
    """Run everything that can run without an external event."""
    for _ in range(50):
        await asyncio.sleep(0)


class Boxed(Say):
    sandbox_spec = ag.AnySandbox()


class Signals(Scripted):
    """An engine with which tasks of even number always score 1, and the others alternate between 0 and 1."""

    def __init__(self) -> None:
        super().__init__([])

    def _next(self, token_ids: Sequence[int], session: str) -> Any:
        name, index, _ = session.split("/")
        return say(str(int(index) % 2 if int(name[1:]) % 2 else 1))

"""Rollouts of the dialogs of `benchmarks.driver` by our driver: the env, its tasks, and how many there are."""

import gc
from collections.abc import Sequence

import agentgym as ag
from agentgym.engines.base import Engine
from agentgym.run.metrics.batch import batch_metrics
from agentgym.scheduling import run_groups
from benchmarks.driver.dialogs import QUESTION, Tool

DIALOGS = 48
GROUP = 8
TOOL = Tool()


class Adder(ag.ToolEnv[ag.Task]):
    """One tool, one reward."""

    @ag.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return TOOL.answer(a, b)

    @ag.reward
    async def answered(self) -> float:
        """Whether the last message is the dialog's answer."""
        return float((self.answer or "").endswith("answer 42"))


class PlainAdder(ag.ToolEnv[ag.Task]):
    """The same with a plain reward method, which has a thread of its own for each rollout."""

    add = Adder.add

    @ag.reward
    def answered(self) -> float:
        """Whether the last message is the dialog's answer."""
        return float((self.answer or "").endswith("answer 42"))


async def ours(engine: Engine, tasks: Sequence[ag.Task], env: type[ag.ToolEnv[ag.Task]] = Adder) -> int:
    """Every dialog in a group of rollouts; how many turns were played."""
    return sum(len(segment.turns) for rollout in await rollouts(engine, tasks, env) for segment in rollout.segments)


async def rollouts(
    engine: Engine, tasks: Sequence[ag.Task], env: type[ag.ToolEnv[ag.Task]] = Adder
) -> list[ag.Rollout]:
    """The rollouts of every dialog, all of them started at once, and the collection that they leave for later."""
    groups = await run_groups(env, tasks, engine, n=GROUP, concurrency=GROUP * len(tasks))
    collect_put_off()
    batch_metrics(groups)  # the other kit's generator makes such figures of a batch, too
    assert all(rollout.reward == 1.0 for rollout in groups.rollouts), groups.rollouts[0].error
    return list(groups.rollouts)


def collect_put_off() -> None:
    """Collect what our scheduler leaves to the begin of its next batch, while this one is still held.

    A measured batch has no next one, and other kits pay for the collector while they play.
    """
    gc.collect(1)


def task(name: str) -> ag.Task:
    """The task of a dialog; what stands behind a hyphen tells tasks of one dialog apart."""
    return ag.Task(id=name, prompt=(ag.Message(role="user", content=f"{name}: {QUESTION}"),))

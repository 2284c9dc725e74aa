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
    """The same env with a plain reward method, for which each rollout needs a thread."""

    add = Adder.add

    @ag.reward
    def answered(self) -> float:
        """Whether the last message is the dialog's answer."""
        return float((self.answer or "").endswith("answer 42"))


async def ours(engine: Engine, tasks: Sequence[ag.Task], env: type[ag.ToolEnv[ag.Task]] = Adder) -> int:
    """Run every dialog in a group of rollouts, and return the number of turns."""
    return sum(len(segment.turns) for rollout in await rollouts(engine, tasks, env) for segment in rollout.segments)


async def rollouts(
    engine: Engine, tasks: Sequence[ag.Task], env: type[ag.ToolEnv[ag.Task]] = Adder
) -> list[ag.Rollout]:
    """Return the rollouts of every dialog, all of them started at once.

    The garbage collection that they put off is included.
    """
    groups = await run_groups(env, tasks, engine, n=GROUP, concurrency=GROUP * len(tasks))
    collect_put_off()
    batch_metrics(groups)  # the other kit's generator computes such metrics of a batch, too
    assert all(rollout.reward == 1.0 for rollout in groups.rollouts), groups.rollouts[0].error
    return list(groups.rollouts)


def collect_put_off() -> None:
    """Collect the garbage that our scheduler leaves to the start of its next batch.

    The batch is still in memory. A measured batch has no next one, and other kits pay for the collector while they run.
    """
    gc.collect(1)


def task(name: str) -> ag.Task:
    """Return the task of a dialog; a suffix after a hyphen distinguishes tasks of the same dialog."""
    return ag.Task(id=name, prompt=(ag.Message(role="user", content=f"{name}: {QUESTION}"),))

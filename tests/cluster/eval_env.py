"""Envs that cluster workers import from this file."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import agentgym as ag
from agentgym.environments.forks import Model


class Slow(ag.ToolEnv[ag.Task]):
    """Rewards answers with an even number of characters; creates a file when it starts, and takes a moment."""

    limits = ag.Limits(turns=1, turn_tokens=6, context_tokens=512)
    folder = ag.Parameter("")

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        first = 0 if split == "train" else 100
        return [ag.Task(id=str(first + i), prompt=f"Say {i}") for i in range(8)]

    async def setup(self) -> None:
        if self.folder:
            (Path(str(self.folder)) / f"began-{self.task.id}").touch()
            await asyncio.sleep(0.5)

    @ag.reward
    def even(self) -> float:
        return float(len(self.answer or "") % 2 == 0)


class Judged(ag.ToolEnv[ag.Task]):
    """Asks a judge, and adds a bonus to each rollout of a task."""

    limits = ag.Limits(turns=1, turn_tokens=6, context_tokens=512)
    bonus = ag.Parameter(0.5)

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return Slow.tasks(split)

    @ag.reward
    async def judged(self) -> float:
        said = await self.model("judge").ask(f"Is this good? {self.answer}", max_tokens=4, temperature=1.0)
        return float(len(said) % 2)

    @classmethod
    async def group_reward(
        cls, task: ag.Task, rollouts: Sequence[ag.Rollout], model: Callable[[str], Model]
    ) -> list[float]:
        return [cls.bonus] * len(rollouts)


def player(model: str) -> ag.TransformersEngine:
    """Return a user-defined engine for a model role."""
    return ag.TransformersEngine("tiny", ag.TransformersConfig(context_tokens=1024))


class Duel(Slow):
    """Lets the model role "opponent" generate after each message."""

    limits = ag.Limits(turns=2, turn_tokens=40, context_tokens=1024)

    async def step(self, action: ag.Message) -> ag.StepResult:
        asked = [ag.Message(role="user", content=str(action["content"]) or "Begin.")]
        async with self.fork("subagent", asked, role="opponent", engine="opponent", train=False) as other:
            await other.turn()
        return await super().step(action)

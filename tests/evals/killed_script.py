"""An evaluation that goes on by one rollout for each line on stdin, and prints the name of each that it begins.

With a number behind its folder it waits for nothing, and plays so many tasks, several rollouts at once.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.types.completion import Completion

TASKS, K = 5, 3
AT_ONCE = 4
"""Rollouts at once, where it waits for nothing."""


class Echo(ag.ToolEnv[ag.Task]):
    """Worth 1 where the answer is yes."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [ag.Task(id=f"t{i}", prompt="?") for i in range(tasks)]

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "yes")


class Waiting(Scripted):
    """Answers a turn when a line comes."""

    free = False

    async def generate(self, token_ids: Sequence[int], **more: Any) -> Completion:
        sys.stdout.write(f"{more['session'].rpartition('/')[0]}\n")
        sys.stdout.flush()
        if not self.free:
            await asyncio.to_thread(sys.stdin.readline)
        return await super().generate(token_ids, **more)


tasks = TASKS

if __name__ == "__main__":
    engine = Waiting(lambda text: say("yes"))
    if len(sys.argv) > 2:
        tasks, engine.free = int(sys.argv[2]), True
    at_once = AT_ONCE if engine.free else 1
    played = asyncio.run(
        ag.evaluate(Echo, engine, n=tasks, k=K, output_dir=sys.argv[1], resume=True, concurrency=at_once)
    )
    sys.stdout.write(f"reward {played.reward} rollouts {len(played.rollouts)}\n")

"""An evaluation that advances by one rollout per line on stdin, and prints the name of each rollout that it starts.

If a number follows the folder, it doesn't wait for lines, and runs that many tasks with several rollouts at once.
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
"""Concurrent rollouts if it doesn't wait for lines."""


class Echo(ag.ToolEnv[ag.Task]):
    """The right answer is "yes"."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [ag.Task(id=f"t{i}", prompt="?") for i in range(tasks)]

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "yes")


class Waiting(Scripted):
    """Generates a turn when a line arrives."""

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

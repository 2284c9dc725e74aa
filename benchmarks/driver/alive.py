"""Scaling of the driver in `benchmarks.driver`: a hundred, a thousand and ten thousand rollouts alive at once.

Once all rollouts have sent a request, the engine responds to 64 of them in each pass of the event loop. So it can
measure how long the loop was blocked. Rollouts that wait for a response are alive, with their env and their segment.
"""

import asyncio
import gc
import time
import tracemalloc
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import agentgym as ag
from agentgym.rollouts.segment import OpenSegment
from agentgym.types.completion import Completion, Sampling

ANSWERS = 64
"""Number of requests to which the engine responds in one pass of the event loop."""


class Paced:
    """An engine that, once `rollouts` requests have arrived, responds to a few of them in each pass of the event loop.

    `longest_s` is the longest pass in CPU seconds, so that other programs on the machine don't count.
    """

    def __init__(self, engine: Any, rollouts: int) -> None:
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.context_tokens, self.version = engine.context_tokens, 0
        self.asked: deque[asyncio.Future[None]] = deque()
        self.awaited, self.longest_s = rollouts, 0.0

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        turn = asyncio.get_running_loop().create_future()
        self.asked.append(turn)
        await turn
        given: Completion = await self.engine.generate(
            token_ids, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed
        )
        return given

    async def release(self, session: str) -> None:
        await self.engine.release(session)

    async def answer(self) -> None:
        """Respond to requests until cancelled."""
        before = time.process_time()
        while True:
            if len(self.asked) >= self.awaited:
                self.awaited = 0
            for _ in range(0 if self.awaited else min(ANSWERS, len(self.asked))):
                turn = self.asked.popleft()
                if not turn.done():
                    turn.set_result(None)
            await asyncio.sleep(0)
            now = time.process_time()
            self.longest_s, before = max(self.longest_s, now - before), now


async def alive(
    play: Callable[[Any, int], Awaitable[int]], engine: Any, rollouts: int, *, rounds: int = 2
) -> dict[str, float]:
    """Return CPU us per turn and the longest pause of the loop in ms with `rollouts` of them alive.

    Each is the least of the rounds.
    """
    least, pause = float("inf"), float("inf")
    for _ in range(rounds):
        paced = Paced(engine, rollouts)
        gc.collect()
        answering = asyncio.create_task(paced.answer())
        cpu = time.process_time()
        turns = await play(paced, rollouts)
        least = min(least, (time.process_time() - cpu) / turns * 1e6)
        answering.cancel()
        pause = min(pause, paced.longest_s * 1e3)
    return {f"alive_{rollouts}_us": least, f"alive_{rollouts}_pause_ms": pause}


async def kept_bytes(play: Callable[[], Awaitable[Sequence[ag.Rollout]]]) -> dict[str, float]:
    """Return the bytes and the number of ids of a finished rollout in memory; a first batch warms the caches."""
    await play()
    gc.collect()
    tracemalloc.start()
    rollouts = await play()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ids = sum(len(segment.token_ids) for rollout in rollouts for segment in rollout.segments)
    return {"kept_bytes_a_rollout": held / len(rollouts), "ids_a_rollout": ids / len(rollouts)}


def open_bytes(chunks: int = 400, length: int = 250) -> float:
    """Return the bytes per id of a segment that still grows; as from a tokenizer, each id is a separate int object."""
    segment = OpenSegment(index=0, parent=None, kind="root", session="s", context_tokens=1 << 30)
    tracemalloc.start()
    for chunk in range(chunks):
        segment.extend([1000 + chunk * length + n for n in range(length)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / (chunks * length)

"""How `benchmarks.driver` fares with more rollouts: a hundred, a thousand, ten thousand of them alive at once.

The engine answers 64 requests in each pass of the event loop, once all rollouts have asked, and sees by that how long
the loop was held up. Rollouts that wait for an answer are alive, with their env and their segment.
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
"""Requests that the engine answers in one pass of the loop."""


class Paced:
    """An engine that answers a few requests in each pass of the loop, once so many were asked at the same time.

    `longest_s` is the longest pass, in CPU seconds: other programs on the machine do not count.
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
        """Answer requests until it is cancelled."""
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
    """CPU microseconds a turn and the longest pause of the loop in ms with so many rollouts alive, the least of two."""
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
    """The bytes that a finished rollout keeps, and its ids; what is played before that warms caches."""
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
    """The bytes that an id takes in a segment that still grows, each id a number of its own as a tokenizer gives it."""
    segment = OpenSegment(index=0, parent=None, kind="root", session="s", context_tokens=1 << 30)
    tracemalloc.start()
    for chunk in range(chunks):
        segment.extend([1000 + chunk * length + n for n in range(length)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / (chunks * length)

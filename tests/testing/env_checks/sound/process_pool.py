"""A reward that is computed in another process, in a pool that all rollouts share."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any

import agentgym as ag
from agentgym.engines.scripted import say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "Spell moon."},))
ORACLE = [say("mooon")]


class Sound(ag.ToolEnv[ag.Task]):
    resources: ProcessPoolExecutor

    @classmethod
    @asynccontextmanager
    async def open_resources(cls) -> AsyncIterator[Any]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool

    @ag.reward
    async def right(self) -> float:
        loop, answer = asyncio.get_running_loop(), (self.answer or "")[:100]
        return float(bool(await loop.run_in_executor(self.resources, get_close_matches, answer, ["moon"])))

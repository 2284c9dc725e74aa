"""Lends the trainer the GPU memory of servers that share its GPUs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig


@asynccontextmanager
async def lent_memory(run: RunConfig, collector: Collector) -> AsyncIterator[None]:
    """Release the GPU memory of the servers that `engine.colocate` selects, and restore it after the `async with`.

    Every training process must call this, and none may send requests inside the `async with`. Only the first process,
    which launched the servers, contacts them. Does nothing if the run's servers aren't colocated.
    """
    engine, peers = collector.engine, collector.peers
    shared = isinstance(run.engine, SGLangConfig) and run.engine.colocate != "off"
    if not (shared and isinstance(engine, SGLangEngine)):
        yield
        return
    await engine.drain()
    await peers.gather([None])  # no process has a request in flight
    if peers.rank == 0:
        await engine.release_memory()
    await peers.gather([None])  # the memory is free
    yield
    if peers.rank == 0:
        await engine.resume_memory()
    await peers.gather([None])
    await engine.reopen()

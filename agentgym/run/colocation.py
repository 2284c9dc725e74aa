"""Lending the GPU memory of servers that share the trainer's GPUs while the trainer runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig


@asynccontextmanager
async def lent_memory(run: RunConfig, collector: Collector) -> AsyncIterator[None]:
    """Have the servers release the memory that `engine.colocate` selects, and take it back after the block.

    Every training process must call it. No process sends requests during the block. The first process, which
    launched the servers, talks to them. Does nothing if the run's servers aren't colocated.
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

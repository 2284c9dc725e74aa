"""The GPU memory of servers that share the trainer's GPUs, lent to it while it trains."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig


@asynccontextmanager
async def lent_memory(run: RunConfig, collector: Collector) -> AsyncIterator[None]:
    """Have the servers give up the memory that `engine.colocate` names, and take it again afterward.

    Every training process calls it. No request is sent meanwhile; the first process, which launched the servers, asks
    them.
    """
    engine, peers = collector.engine, collector.peers
    shared = isinstance(run.engine, SGLangConfig) and run.engine.colocate != "off"
    if not (shared and isinstance(engine, SGLangEngine)):
        yield
        return
    await engine.drain()
    await peers.gather([None])  # nobody's request is in flight
    if peers.rank == 0:
        await engine.release_memory()
    await peers.gather([None])  # the memory is there
    yield
    if peers.rank == 0:
        await engine.resume_memory()
    await peers.gather([None])
    await engine.reopen()

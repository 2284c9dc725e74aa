"""Our sandboxes in `benchmarks.sandbox`: calls, episodes, leases, forks, and many at once."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentgym.machine.process_identity import owner
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.protocol import Sandbox, SandboxPool, SandboxSpec
from benchmarks.sandbox.measure import (
    AS_PROGRAM,
    CALLS_PER_EPISODE,
    CELL,
    Action,
    Figures,
    available_mib,
    by_turns,
    container_pids,
    cpu_s,
    engine_pids,
    milliseconds,
    percentile,
    pss_mib,
    rate,
    side,
    tree,
)

SANDBOXES = (1, 8, 32)
AT_ONCE = (1, 8)
STARTS_AT_ONCE = 4
SANDBOXES_AT_ONCE = 500
HEAPS_MB = (0, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Numbers of calls, seconds and sandboxes of a measurement."""

    calls: int
    """Calls for latencies."""
    seconds: float
    """Seconds for each rate."""
    turns: int
    """Turns of each side of a comparison."""
    repeats: int
    """Repetitions of slow operations: new sandboxes and forks."""
    execs: int
    """Calls in other ways, on one container."""
    sandboxes: int
    """Sandboxes that are open at once."""


FULL = Amount(calls=3000, seconds=5.0, turns=4, repeats=15, execs=60, sandboxes=SANDBOXES_AT_ONCE)
QUICK = Amount(calls=300, seconds=1.0, turns=1, repeats=4, execs=12, sandboxes=16)


def cell(sandbox: Sandbox) -> Action:
    """Return a function that makes one call of the sandbox and checks its result."""

    async def call() -> None:
        assert (await sandbox.python(CELL)).stdout == "2\n"

    return call


def program(sandbox: Sandbox) -> Action:
    """Return a function that runs a new Python in the sandbox and checks its output.

    Another kit does this for each call.
    """

    async def call() -> None:
        assert (await sandbox.exec(AS_PROGRAM)).stdout == "2\n"

    return call


async def episode(sandboxes: SandboxPool) -> None:
    """Lease a sandbox and make its calls; the next lease waits for the reset that follows."""
    async with sandboxes.lease() as sandbox:
        for _ in range(CALLS_PER_EPISODE):
            await sandbox.python(CELL)


async def fresh_episode(sandboxes: SandboxPool) -> None:
    """Run an episode in a sandbox that is terminated afterwards, so that the next one must be started."""
    async with sandboxes.lease() as sandbox:
        for _ in range(CALLS_PER_EPISODE):
            await sandbox.python(CELL)
        await sandbox.close()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def leased(sandboxes: SandboxPool, count: int) -> AsyncIterator[list[Sandbox]]:
    """Yield `count` leased sandboxes, each of which has answered a call."""
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(sandboxes.lease()) for _ in range(count)]
        for sandbox in held:
            await sandbox.python(CELL)
        yield held


def our_containers(client: Any) -> list[str]:
    """Return the ids of this process's running containers."""
    found = client.containers(filters={"label": f"agentgym.owner={owner()}"})
    return [container["Id"] for container in found]


def sandbox_pids(kind: str) -> list[int]:
    """Return every process inside our sandboxes, and the processes that keep them running.

    The latter are bwrap itself, or the containers' shims and the engine.
    """
    if kind == "bubblewrap":
        return [pid for pid in tree(os.getpid()) if pid != os.getpid()]
    client = connect()
    try:
        first = [client.inspect_container(name)["State"]["Pid"] for name in our_containers(client)]
    finally:
        client.close()
    return [*engine_pids(), *(inner for pid in first for inner in container_pids(pid))]


async def calls(spec: SandboxSpec, kind: str, amount: Amount) -> Figures:
    """Measure latency on one sandbox; rate and processor time on 1, 8 and 32; memory of 32 idle ones."""
    figures: Figures = {}
    for count in SANDBOXES:
        before = available_mib()
        async with spec.open(count) as sandboxes, leased(sandboxes, count) as held:
            pids = sandbox_pids(kind)
            if count == SANDBOXES[0]:
                taken = await milliseconds(cell(held[0]), amount.calls)
                figures |= {"call_p50_ms": percentile(taken, 50), "call_p99_ms": percentile(taken, 99)}
                taken = await milliseconds(partial(held[0].exec, "true"), amount.calls // 10)
                figures |= {"shell_p50_ms": percentile(taken, 50)}
            if count == SANDBOXES[-1]:
                figures["idle_sandbox_pss_mib"] = pss_mib(sorted({*pids} - {*engine_pids()})) / count
                figures["idle_sandbox_all_in_mib"] = (before - available_mib()) / count
            spent = time.process_time() + cpu_s(pids)
            figures[f"calls_per_s_{count}"], done = await rate([cell(sandbox) for sandbox in held], amount.seconds)
            figures[f"cpu_ms_per_call_{count}"] = (time.process_time() + cpu_s(pids) - spent) / done * 1e3
    return figures


async def episodes(spec: SandboxSpec, amount: Amount) -> Figures:
    """Measure resets, episodes on 1 and on 8 warm sandboxes, and episodes that each use a new sandbox."""
    figures: Figures = {}
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        resets = []
        for _ in range(amount.calls // 10):
            await sandbox.python(CELL)
            resets += await milliseconds(sandbox.reset, 1)
        figures["reset_p50_ms"] = percentile(sorted(resets), 50)
    for count in AT_ONCE:
        async with spec.open(count) as warm, spec.open(count) as new:
            async with leased(warm, count):
                pass
            ours, fresh = [partial(episode, warm)] * count, [partial(fresh_episode, new)] * count
            sides = {"episodes": side(ours), "fresh_episodes": side(fresh)}
            rates = await by_turns(sides, amount.seconds, amount.turns)
            figures |= {f"{name}_per_s_{count}": value for name, value in rates.items()}
    return figures


async def leases(spec: SandboxSpec, amount: Amount) -> Figures:
    """Measure leases of a new sandbox and of one from the warm pool."""
    new, warm = [], []
    async with spec.open(amount.repeats) as sandboxes, contextlib.AsyncExitStack() as stack:

        async def lease() -> None:
            await stack.enter_async_context(sandboxes.lease())

        new = await milliseconds(lease, amount.repeats)
        await stack.aclose()
        for _ in range(amount.repeats):
            await asyncio.sleep(0.1)  # until the resets in the background have ended
            warm += await milliseconds(lease, 1)
            await stack.aclose()
    return {"new_sandbox_p50_ms": percentile(new, 50), "pool_lease_p50_ms": percentile(sorted(warm), 50)}


async def forks(spec: SandboxSpec, amount: Amount) -> Figures:
    """Measure a fork of a sandbox by the size of its heap; return {} if sandboxes can't be forked."""
    figures: Figures = {}
    for heap_mb in HEAPS_MB:
        async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
            fork = getattr(sandbox, "fork", None)
            if fork is None:
                return {}
            await sandbox.python(f"heap = bytearray(b'1') * ({heap_mb} << 20)")
            taken = []
            for _ in range(amount.repeats):
                began = time.perf_counter()
                branch = await fork()
                taken.append((time.perf_counter() - began) * 1e3)
                await branch.close()
            figures[f"fork_{heap_mb}mb_p50_ms"] = percentile(sorted(taken), 50)
    return figures


async def many(spec: SandboxSpec, amount: Amount) -> Figures:
    """Measure how many sandboxes can be open and answer at once, and how long they take to start.

    Failures are printed to stderr.
    """
    before = available_mib()
    began = time.perf_counter()
    async with spec.open(amount.sandboxes) as sandboxes, contextlib.AsyncExitStack() as stack:
        turns = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start() -> Sandbox:
            async with turns:
                return await stack.enter_async_context(sandboxes.lease())

        started = await asyncio.gather(*(start() for _ in range(amount.sandboxes)), return_exceptions=True)
        took = time.perf_counter() - began
        held = [sandbox for sandbox in started if not isinstance(sandbox, BaseException)]
        said = await asyncio.gather(*(cell(sandbox)() for sandbox in held), return_exceptions=True)
        failures = [error for error in (*started, *said) if isinstance(error, BaseException)]
        for error in failures:
            print(f"one of {amount.sandboxes} sandboxes failed: {error!r}", file=sys.stderr)
        return {
            "sandboxes_at_once": float(amount.sandboxes - len(failures)),
            "sandboxes_at_once_failures": float(len(failures)),
            "sandboxes_at_once_start_s": took,
            "sandboxes_at_once_all_in_mib": (before - available_mib()) / amount.sandboxes,
        }

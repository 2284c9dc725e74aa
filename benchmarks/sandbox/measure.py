"""Measuring functions of `benchmarks.sandbox` and of the programs it starts: standard library only, Linux only."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

CELL = "1 + 1"
AS_PROGRAM = ["python3", "-I", "-S", "-c", "print(1 + 1)"]
CALLS_PER_EPISODE = 8
TICKS = os.sysconf("SC_CLK_TCK")
Figures = dict[str, float]
Action = Callable[[], Awaitable[object]]


class Rate(NamedTuple):
    """How often something was done."""

    a_second: float
    times: int


Side = Callable[[float], Awaitable[Rate]]
"""One side of a comparison: a function that does its work for that many seconds."""


# ---------------------------------------------------------------------------------------------------- time


async def milliseconds(action: Action, times: int) -> list[float]:
    """Return the milliseconds of each repetition, in ascending order."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        await action()
        taken.append((time.perf_counter() - began) * 1e3)
    return sorted(taken)


def percentile(rising: list[float], percent: float) -> float:
    """Return a percentile of ascending values, by nearest rank."""
    return rising[min(int(len(rising) * percent / 100), len(rising) - 1)]


async def rate(actions: Sequence[Action], seconds: float) -> Rate:
    """Return how often the actions were done, per second and in total; the actions repeat concurrently."""
    began = time.perf_counter()
    done = 0

    async def repeat(action: Action) -> None:
        nonlocal done
        while time.perf_counter() < began + seconds:
            await action()
            done += 1

    async with asyncio.TaskGroup() as group:
        for action in actions:
            group.create_task(repeat(action))
    return Rate(done / (time.perf_counter() - began), done)


def side(actions: Sequence[Action]) -> Side:
    """Return these actions, run concurrently, as one side of a comparison."""
    return partial(rate, actions)


async def by_turns(sides: Mapping[str, Side], seconds: float, turns: int) -> dict[str, float]:
    """Return each side's rate per second, measured in `turns` turns each.

    A busy machine that slows one side then slows the others, too.
    """
    done, took = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0.0)
    for _ in range(turns):
        for name, work in sides.items():
            a_second, times = await work(seconds / turns)
            done[name] += times
            took[name] += times / a_second
    return {name: done[name] / took[name] for name in sides}


# ---------------------------------------------------------------------------------------------------- processes


def tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for children in Path("/proc", str(pid), "task").glob("*/children"):
            for child in children.read_text().split():
                yield from tree(int(child))


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor seconds of these processes and of their children that have ended."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / TICKS


def pss_mib(pids: list[int]) -> float:
    """Return the memory of these processes; pages that several share are split between them."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path("/proc", str(pid), "smaps_rollup").read_text()
            kib += int(text.partition("\nPss:")[2].split()[0])
    return kib / 1024


def available_mib() -> float:
    """Return the machine's available memory."""
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) / 1024


def engine_pids() -> list[int]:
    """Return the engine's daemons, which work for all containers of the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() in ("dockerd", "containerd"):
                found.append(int(path.parent.name))
    return found


def container_pids(first: int) -> list[int]:
    """Return every process in the container with this first process, and the container's shim."""
    shim = int(Path("/proc", str(first), "stat").read_text().rpartition(")")[2].split()[1])
    return list(tree(shim))

"""The two ends of the pipe between `benchmarks.sandbox` and another kit's program, with one JSON object per line.

The program runs in an environment that has the kit and no agentgym, so this uses the standard library only. Its first
line is a `Hello`; after that it answers each request with one line, and ends its containers when its input ends.
"""

import asyncio
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypedDict, TypeVar

from benchmarks.harness import ROOT
from benchmarks.sandbox.measure import (
    CALLS_PER_EPISODE,
    Action,
    Figures,
    Rate,
    Side,
    container_pids,
    cpu_s,
    engine_pids,
    milliseconds,
    percentile,
    rate,
    tree,
)

B = TypeVar("B")


class Hello(TypedDict):
    """The first line of a program."""

    version: str
    ways: list[str]
    """The ways in which it can make a call; its episodes use the first one."""
    note: str
    """A note for the reader of its results; may be empty."""
    why_not: str | None
    """Why it can't run here, or None."""


class Kit(Protocol[B]):
    """Containers of another kit."""

    version: str
    note: str
    ways: tuple[str, ...]

    async def open(self) -> None:
        """Check the requirements, and raise if one is missing."""

    async def new(self) -> B:
        """Return a container that is ready for calls."""

    async def call(self, sandbox: B, way: str) -> None:
        """Run one cell, and check its result."""

    async def pid(self, sandbox: B) -> int:
        """Return the id of the container's first process on this machine."""

    async def end(self, sandbox: B) -> None:
        """Remove the container."""

    async def close(self) -> None:
        """Remove everything that is left."""


# ---------------------------------------------------------------------------------------------------- the program


class Answering(Generic[B]):
    """Answers requests with a kit; warm containers stay open between requests."""

    def __init__(self, kit: Kit[B]) -> None:
        self.kit = kit
        self.warm: list[B] = []

    async def warmed(self, count: int) -> list[B]:
        """Return `count` containers, each of which has answered a call in every way."""
        while len(self.warm) < count:
            sandbox = await self.kit.new()
            self.warm.append(sandbox)
            for way in self.kit.ways:
                await self.kit.call(sandbox, way)
        return self.warm[:count]

    async def latency(self, way: str, times: int) -> Figures:
        """Measure one container's calls, and their processor time in this process, the engine and the container."""
        [sandbox] = await self.warmed(1)
        inside = container_pids(await self.kit.pid(sandbox))
        spent = self._spent(inside)
        taken = await milliseconds(partial(self.kit.call, sandbox, way), times)
        cpu_ms = (self._spent(inside) - spent) / times * 1e3
        return {"p50_ms": percentile(taken, 50), "p99_ms": percentile(taken, 99), "cpu_ms_per_call_1": cpu_ms}

    async def calls(self, way: str, count: int, seconds: float) -> Rate:
        """Return the rate of calls into warm containers."""
        sandboxes = await self.warmed(count)
        return await rate([partial(self.kit.call, sandbox, way) for sandbox in sandboxes], seconds)

    async def episodes(self, way: str, count: int, seconds: float) -> Rate:
        """Return the rate of episodes, each in a new container."""
        actions: list[Action] = [partial(self._episode, way)] * count
        return await rate(actions, seconds)

    async def new_sandboxes(self, times: int) -> list[float]:
        """Return the milliseconds that each new container took, in ascending order."""
        sandboxes: list[B] = []

        async def start() -> None:
            sandboxes.append(await self.kit.new())

        try:
            return await milliseconds(start, times)
        finally:
            for sandbox in sandboxes:
                await self.kit.end(sandbox)

    async def end(self) -> None:
        """End the warm containers and the kit."""
        for sandbox in self.warm:
            await self.kit.end(sandbox)
        await self.kit.close()

    async def _episode(self, way: str) -> None:
        sandbox = await self.kit.new()
        try:
            for _ in range(CALLS_PER_EPISODE):
                await self.kit.call(sandbox, way)
        finally:
            await self.kit.end(sandbox)

    @staticmethod
    def _spent(inside: list[int]) -> float:
        return cpu_s([*tree(os.getpid()), *engine_pids(), *inside])


async def answer(kit: Kit[B]) -> None:
    """Print the hello, and answer every request until the input ends; other output goes to stderr."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    hello = Hello(version=kit.version, ways=list(kit.ways), note="", why_not=None)
    answering = Answering(kit)
    try:
        try:
            await kit.open()
        except Exception as error:
            traceback.print_exc()
            print(json.dumps(hello | {"why_not": " ".join(str(error).split())}), file=said)
            return
        print(json.dumps(hello | {"note": kit.note}), file=said)
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            work: Callable[..., Awaitable[Any]] = getattr(answering, request.pop("do"))
            print(json.dumps(await work(**request)), file=said)
    finally:
        await answering.end()


# ---------------------------------------------------------------------------------------------------- the benchmark


class Peer:
    """Another kit's program, run by the Python of its environment; it works only when it gets a request."""

    def __init__(self, name: str, python: Path | str, program: str, image: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(python), "-m", program, image],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C closes its input, and then it removes its containers
        )
        try:
            self.hello: Hello = self._answer()
        except BaseException:
            self.close()
            raise

    async def ask(self, do: str, **request: Any) -> Any:
        """Return the program's answer.

        Raises:
            RuntimeError: If the program ended.
        """
        return await asyncio.to_thread(self._ask, {"do": do} | request)

    def side(self, work: str, way: str, count: int) -> Side:
        """Return its calls or episodes, on `count` containers, as one side of a comparison."""

        async def turn(seconds: float) -> Rate:
            return Rate(*await self.ask(work, way=way, count=count, seconds=seconds))

        return turn

    def close(self) -> None:
        """Stop the program and wait until it has removed its containers."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: its program ended with exit code {self._process.wait()}; see stderr")
        return json.loads(line)

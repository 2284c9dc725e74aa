"""A kit whose sandboxes are processes on this machine, run as another kit's program is."""

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field

from benchmarks.sandbox.peer import Answering, answer

ECHO = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + 0.002
    while time.process_time() < until:
        pass
    print(line, end="", flush=True)
"""
Process = subprocess.Popen[str]


@dataclass
class Processes:
    """Processes that echo each line."""

    image: str
    version: str = "1"
    note: str = "a note"
    ways: tuple[str, ...] = ("pipe",)
    running: list[Process] = field(default_factory=list)
    calls: int = 0
    made: int = 0

    async def open(self) -> None:
        os.write(1, b"this is no answer\n")
        if self.image == "missing":
            raise RuntimeError("the image missing\nis not here")

    async def new(self) -> Process:
        made = started()
        self.running.append(made)
        self.made += 1
        return made

    async def call(self, sandbox: Process, way: str) -> None:
        assert way == "pipe"
        assert sandbox.stdin
        assert sandbox.stdout
        print("1", file=sandbox.stdin, flush=True)
        assert await asyncio.to_thread(sandbox.stdout.readline) == "1\n"
        self.calls += 1

    async def pid(self, sandbox: Process) -> int:
        return sandbox.pid

    async def end(self, sandbox: Process) -> None:
        self.running.remove(sandbox)
        sandbox.kill()
        sandbox.communicate()

    async def close(self) -> None:
        assert not self.running


def started() -> Process:
    return subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def pids(self: Answering[Process]) -> list[int]:
    return [sandbox.pid for sandbox in self.warm]


async def counts(self: Answering[Process]) -> tuple[int, int]:
    """Return the numbers of calls and of new sandboxes so far."""
    assert isinstance(self.kit, Processes)
    return self.kit.calls, self.kit.made


Answering.pids = pids  # type: ignore[attr-defined]
Answering.counts = counts  # type: ignore[attr-defined]
asyncio.run(answer(Processes(sys.argv[1])))

"""Kill everything at random, with a seed; afterwards every episode is accounted for and nothing of ours is left."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.docker import Docker
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST
from tests.sandboxes.conftest import descriptors, wait_for_end
from tests.sandboxes.engines import Engine, started

if TYPE_CHECKING:
    import docker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.docker,
]

SANDBOXES, AT_ONCE = 6, 8
SEED = int(os.environ.get("AGENTGYM_CHAOS_SEED", "0"))
CLIENT_EPISODES = 10


@dataclass(frozen=True)
class Size:
    """The minimum number of episodes, and how many of the things they need die in the meantime."""

    episodes: int
    clients: int
    engines: int
    containers: int
    cancels: int


PART = Size(episodes=800, clients=20, engines=2, containers=80, cancels=200)
FULL = Size(episodes=2000, clients=50, engines=5, containers=200, cancels=500)
CLIENT = f"""
import asyncio
from agentgym.sandboxes.docker.docker import Docker
from tests.sandboxes.conftest import with_many_files_open
from tests.sandboxes.test_chaos import end_of, episode

async def work(sandboxes, name):
    for number in range({CLIENT_EPISODES} // 2):
        print("started", flush=True)
        try:
            await episode(sandboxes, name + str(number))
        except Exception as error:
            how, what = end_of(error)
            print(how, *([what] if what else []), flush=True)
        else:
            print("finished", flush=True)

async def main():
    async with Docker().open(2) as sandboxes, asyncio.TaskGroup() as tasks:
        for name in "ab":
            tasks.create_task(work(sandboxes, name))

with with_many_files_open():
    asyncio.run(main())
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Yield a running engine that DOCKER_HOST names."""
    with started() as ours:
        monkeypatch.setenv("DOCKER_HOST", ours.address)
        yield ours


class _client:
    """The engine's client as a context manager that closes it."""

    def __enter__(self) -> "docker.APIClient":
        self.api = connect()
        return self.api

    def __exit__(self, *_: object) -> None:
        self.api.close()


# ---------------------------------------------------------------------------------------------- episodes


async def episode(sandboxes: SandboxPool, name: str) -> None:
    """Run a few calls of every kind; each answers correctly or not at all."""
    async with sandboxes.lease() as sandbox:

        async def check(call: str, answer: Awaitable[Any], right: str) -> None:
            """Raise an AssertionError that names the call, the sandbox and the answer if the answer is wrong."""
            said = await answer
            if said != right and getattr(said, "stdout", None) != right:
                raise AssertionError(
                    f"{name}: {call} of the Docker sandbox {sandbox.digest} answered {said!r} instead of {right!r}"
                )

        await check("python of a new name", sandbox.python("'x' in globals()"), "False\n")
        await sandbox.write({"f": name})
        await check("python of a file", sandbox.python(f"x = {name!r}\nopen('f').read() == x"), "True\n")
        await check("exec", sandbox.exec("cat f"), name)
        await check("a host function", sandbox.python("get()", functions={"get": lambda: name}), f"{name!r}\n")
        await check("read", _text(sandbox.read("f")), name)


async def _text(content: Awaitable[bytes]) -> str:
    return (await content).decode()


def end_of(error: BaseException) -> tuple[str, str]:
    """Return an episode's outcome and, for a forbidden outcome, what is wrong, in one line."""
    if isinstance(error, SandboxError) and str(error).startswith(f"{SANDBOX_LOST}: "):
        return "lost", ""
    how = "unlabeled" if isinstance(error, SandboxError) else "wrong"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.line for frame in frames if frame.name == "episode"), "")
    return how, f"seed {SEED}: {type(error).__name__} at `{line}`: {error}".replace("\n", "\\n")


@types.coroutine
def cancelled_at(coroutine: Coroutine[Any, Any, None], number: int) -> Generator[Any, Any, None]:
    """Run the coroutine, cancelling its task while it waits for the `number`-th time."""
    task = asyncio.current_task()
    assert task is not None
    steps = coroutine.__await__()
    error: BaseException | None = None
    while True:
        try:
            waiting = steps.send(None) if error is None else steps.throw(error)
        except StopIteration:
            return
        number -= 1
        if number == 0:
            asyncio.get_running_loop().call_soon(task.cancel)
        error = None
        try:
            yield waiting
        except BaseException as caught:
            error = caught


@dataclass
class Chaos:
    """The actions so far, and how the episodes ended."""

    size: Size
    engine: Engine
    random: random.Random
    up: asyncio.Event = field(default_factory=asyncio.Event)
    done: "Counter[str]" = field(default_factory=Counter)
    killed: "Counter[str]" = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """The episodes that ended in a forbidden way."""
    pids: set[int] = field(default_factory=lambda: {os.getpid()})

    def enough(self) -> bool:
        return (
            self.done["started"] >= self.size.episodes
            and self.killed["engine"] >= self.size.engines
            and self.killed["container"] >= self.size.containers
            and self.done["cancelled"] >= self.size.cancels
        )

    async def run(self) -> None:
        self.up.set()
        async with Docker().open(SANDBOXES) as sandboxes, asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self.work(sandboxes))
            for _ in range(2):
                tasks.create_task(self.clients())

    async def work(self, sandboxes: SandboxPool) -> None:
        """Run one episode after another until enough has happened."""
        size, killed = self.size, self.killed
        while not self.enough() and self.done["started"] < 3 * size.episodes:
            await self.up.wait()
            self.done["started"] += 1
            number = self.done["started"]
            await self.attempt(sandboxes, number)
            # By how many are due: episodes that the clients start count too, so not every number comes by here.
            if killed["engine"] < min(size.engines, number * (size.engines + 1) // size.episodes):
                await self.kill_engine()
            elif number % (size.episodes // size.containers) < 2 and killed["container"] < size.containers:
                await asyncio.to_thread(self.kill_container)

    async def attempt(self, sandboxes: SandboxPool, number: int) -> None:
        running = episode(sandboxes, f"episode {number}")
        if number % (self.size.episodes // self.size.cancels) < 2 and self.done["cancelled"] < self.size.cancels:
            running = _as_coroutine(cancelled_at(running, self.random.randrange(1, 7)))
        task = asyncio.create_task(running)
        await asyncio.wait({task})
        self.note(task)

    def note(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self.done["cancelled"] += 1
        elif error is None:
            self.done["finished"] += 1
        else:
            self.count(*end_of(error))

    def count(self, how: str, what: str) -> None:
        self.done[how] += 1
        if what:
            self.wrong.append(what)

    async def kill_engine(self) -> None:
        self.killed["engine"] += 1
        self.up.clear()
        await asyncio.to_thread(self.engine.kill)
        await asyncio.to_thread(self.engine.start)
        self.up.set()

    def kill_container(self) -> None:
        """Kill a random container of any client."""
        try:
            with _client() as client:
                running = client.containers(filters={"label": "agentgym.owner"})
                client.kill(self.random.choice(running)["Id"])
            self.killed["container"] += 1
        except _misses():
            self.killed["container missed"] += 1

    def folders(self) -> list[Path]:
        """Return the folders that are named after one of our processes."""
        found = Path(tempfile.gettempdir()).glob("agentgym-*")
        return [folder for folder in found if any(f"_{pid}_" in folder.name for pid in self.pids)]

    async def clients(self) -> None:
        """Run other processes, each killed with SIGKILL at a random line of its output."""
        while self.killed["client"] < self.size.clients and self.done["clients"] < 4 * self.size.clients:
            await self.up.wait()
            self.done["clients"] += 1
            async with _client_process() as process:
                self.pids.add(process.pid)
                said = await self.listen(process, self.random.randrange(1, 2 * CLIENT_EPISODES - 1))
            self.done.update(said)
            self.done["died with their client"] += said["started"] - said.total() + said["started"]

    async def listen(self, process: asyncio.subprocess.Process, until: int) -> "Counter[str]":
        """Count the words that the process prints until it ends; kill it at line `until`."""
        assert process.stdout is not None
        said: Counter[str] = Counter()
        while line := await process.stdout.readline():
            word, _, what = line.decode().strip().partition(" ")
            said[word] += 1
            if what:
                self.wrong.append(what)
            if said.total() == until:
                os.kill(process.pid, signal.SIGKILL)  # Not send_signal: it may reap the child that asyncio waits for.
                self.killed["client"] += 1
        return said


async def _as_coroutine(steps: Any) -> None:
    await steps


def _misses() -> tuple[type[Exception], ...]:
    """Return the errors of a kill that found no engine or no container, or whose target is already gone."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    return SandboxError, OSError, IndexError, DockerException, RequestException


@asynccontextmanager
async def _client_process() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CLIENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()


# ---------------------------------------------------------------------------------------------- the claim


@pytest.mark.parametrize("size", [PART, pytest.param(FULL, marks=pytest.mark.proof)], ids=["part", "full"])
async def test_after_everything_dies_nothing_is_left_and_every_episode_is_accounted_for(
    size: Size, engine: Engine, many_files: None
) -> None:
    handles = descriptors()
    threads = threading.active_count()
    chaos = Chaos(size, engine, random.Random(SEED))
    await chaos.run()
    async with Docker().open(1):  # The only sweep.
        pass
    await asyncio.get_running_loop().shutdown_default_executor()
    done, killed = chaos.done, chaos.killed
    sys.stdout.write(f"{dict(done)} {dict(killed)}\n")
    assert chaos.wrong == []
    assert done["unlabeled"] == done["wrong"] == 0
    assert done["started"] == done["finished"] + done["lost"] + done["cancelled"] + done["died with their client"]
    assert done["started"] >= size.episodes
    assert killed["client"] >= size.clients
    assert killed["engine"] == size.engines
    assert killed["container"] >= size.containers
    assert done["cancelled"] >= size.cancels
    assert wait_for_end(engine.processes()) == []
    with _client() as client:
        assert client.containers(all=True) == []
        assert not client.volumes()["Volumes"]
    assert chaos.folders() == []
    gc.collect()
    assert descriptors() <= handles
    assert threading.active_count() <= threads

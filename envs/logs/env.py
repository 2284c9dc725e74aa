"""Logs: clean a large log file, which is streamed into the sandbox and streamed out again after cleaning.

Neither this process nor the sandbox's server has more than a few megabytes of it in memory, whatever its size is.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.errors import SandboxContentError
from agentgym.testing import Reply, call, say

COUNT = 10_000
"""Number of tasks per split."""
MB = 1 << 20
LEVELS = ("DEBUG", "INFO", "WARNING", "INFO", "ERROR", "DEBUG", "INFO", "TRACE")
DROPPED = ("DEBUG", "TRACE")
PROMPT = """\
app.log in your working folder is a log of about {megabytes} MB; each line begins with its level. Write to clean.log the
lines of app.log, in their order, without those of the levels DEBUG and TRACE."""
DIGEST = """
import hashlib, os, stat
def digest(path, limit):
    made = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            return "no file, or too large"  # A link to /dev/zero would be read until the time is up.
        while piece := file.read(1 << 20):
            made.update(piece)
    return made.hexdigest()
"""


class LogTask(ag.Task):
    """The seed from which a log is generated, and the log's size."""

    number: int
    megabytes: int = Field(ge=1)


def make_task(split: ag.Split, index: int, megabytes: int = 16) -> LogTask:
    """Create the task of an index; the same arguments always give the same task."""
    prompt = ag.Message(role="user", content=PROMPT.format(megabytes=megabytes))
    number = index if split == "train" else COUNT + index
    return LogTask(id=f"logs-{split}-{index}", prompt=(prompt,), number=number, megabytes=megabytes)


def pieces(task: LogTask) -> Iterator[tuple[bytes, bytes]]:
    """Yield the log in pieces of about a megabyte, each with its cleaned version."""
    for piece in range(task.megabytes):
        word = hashlib.sha256(f"{task.number} {piece}".encode()).hexdigest()
        lines = [f"{level} {piece} {word}\n" for level in LEVELS]
        clean = "".join(line for line in lines if not line.startswith(DROPPED))
        times = MB // len("".join(lines))
        yield "".join(lines).encode() * times, clean.encode() * times


def write_log(task: LogTask, path: Path) -> str:
    """Write a task's log, and return the digest of the cleaned log."""
    clean = hashlib.sha256()
    with path.open("wb") as file:
        for piece, kept in pieces(task):
            file.write(piece)
            clean.update(kept)
    return clean.hexdigest()


def digest_of(path: Path) -> str:
    """Return the digest of a file, or "" for a folder, which the sandbox may have under that name."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@ag.register("logs")
class Logs(ag.ToolEnv[LogTask]):
    """Reward 0.5 for a clean log in the sandbox, and 0.5 for the same bytes after it was streamed out."""

    limits = ag.Limits(turns=6, seconds=900)

    def __init__(self, task: LogTask) -> None:
        super().__init__(task)
        self.wanted = ""
        """Digest of the clean log, which never enters the sandbox."""
        self.limit = (task.megabytes + 1) * MB
        """Largest number of bytes in a clean log."""

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[LogTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    @classmethod
    def sandbox_for(cls, task: LogTask) -> ag.AnySandbox:
        """Return a sandbox with space for the log and the cleaned log."""
        return ag.AnySandbox(disk_mb=2 * task.megabytes + 16)

    async def setup(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "app.log")
            self.wanted = await asyncio.to_thread(write_log, self.task, log)
            await self.sandbox.put(log, "app.log", timeout_s=self.limits.seconds)

    @ag.tool(timeout_s=240)
    async def bash(self, cmd: Annotated[str, Field(max_length=1000)]) -> str:
        """Run a shell command in the working folder."""
        return (await self.sandbox.exec(cmd, timeout_s=230)).text(limit=1000)

    @ag.reward(weight=0.5)
    async def clean(self) -> float:
        """Return whether clean.log is right when a fresh process in the sandbox reads it."""
        expect = {f"digest('clean.log', {self.limit})": self.wanted}
        return (await self.sandbox.verify(code=DIGEST, expect=expect, timeout_s=240)).fraction

    @ag.reward(weight=0.5)
    async def returned(self) -> float:
        """Return whether clean.log is right after it was streamed out of the sandbox."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "clean.log")
            try:
                await self.sandbox.get("clean.log", target, limit=self.limit, timeout_s=self.limits.seconds)
            except SandboxContentError:  # It doesn't exist, isn't a file, or is too large.
                return 0.0
            return float(await asyncio.to_thread(digest_of, target) == self.wanted)


def oracle(task: LogTask) -> list[Reply]:
    """Return replies that clean the log; `agentgym check` and the tests play them."""
    return [call("bash", cmd=f"grep -vE '^({'|'.join(DROPPED)}) ' app.log > clean.log"), say("Done.")]

"""Terminal: a small job for a shell, judged by hidden checks when the session has ended.

What the model says counts for nothing. The checks look at a copy of the working folder, from processes that the session
never touched, and their right values never enter the sandbox.
"""

import random
from functools import partial
from typing import Annotated, Any

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call, say
from envs.terminal.jobs import KINDS

COUNT = 10_000
"""Tasks of each split."""
PROMPT = "{job}\n\nUse the tool shell; it begins in the folder that this is about. Say done when it is done."
CHECKS = """
import os

def text(path):
    with open(path) as file:
        return file.read()

def texts(folder):
    paths = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
    return {os.path.relpath(path, folder): text(path) for path in paths}

def modes(folder):
    return {name: os.stat(os.path.join(folder, name)).st_mode & 0o777 for name in os.listdir(folder)}
"""


class TerminalTask(ag.Task):
    """Files, a command that the session begins with, and what the hidden checks should find."""

    kind: str
    files: dict[str, str]
    prepare: str
    expect: dict[str, Any]
    """The right values of expressions, with the names of CHECKS."""
    solution: str
    """A shell command that does the job."""


def make_task(split: ag.Split, index: int) -> TerminalTask:
    """Make the task of an index, always the same; the kinds take turns, index by index."""
    kind = KINDS[index % len(KINDS)]
    job = kind(random.Random(f"{split} {index}"))
    return TerminalTask(
        id=f"terminal-{split}-{index}",
        prompt=PROMPT.format(job=job.prompt),
        kind=kind.__name__,
        files=job.files,
        prepare=job.prepare,
        expect=job.expect,
        solution=job.solution,
    )


@ag.register("terminal")
class Terminal(ag.ToolEnv[TerminalTask]):
    """Reward 1 where the files are as the job wants them."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=10, seconds=180)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[TerminalTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    async def setup(self) -> None:
        await self.sandbox.write(self.task.files)
        if self.task.prepare:
            prepared = await self.sandbox.exec(self.task.prepare)
            if not prepared.ok:
                raise RuntimeError(f"the session could not be prepared: {prepared.text()}")

    @ag.tool(timeout_s=40)
    async def shell(self, command: Annotated[str, Field(max_length=4000)]) -> str:
        """Run a shell command. Files stay from call to call; variables and the current folder do not."""
        return (await self.sandbox.exec(command, timeout_s=30)).text(limit=4000) or "[no output]"

    @ag.reward
    async def done(self) -> float:
        """Whether every hidden check finds its right value; half a job is none."""
        return float((await self.sandbox.verify(code=CHECKS, expect=self.task.expect)).ok)


def oracle(task: TerminalTask) -> list[Reply]:
    """Replies that solve the task; `agentgym check` and the tests play them."""
    return [call("shell", command=task.solution), say("Done.")]

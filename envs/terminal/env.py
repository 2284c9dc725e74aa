"""Terminal: a small job in a shell, judged by hidden checks after the session ends.

The model's claims have no effect. The checks look at a copy of the working directory, in processes that the session
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
"""Number of tasks per split."""
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
    """Files, a command that runs before the session, and what the hidden checks should find."""

    kind: str
    files: dict[str, str]
    prepare: str
    expect: dict[str, Any]
    """The right values of expressions over the names in CHECKS."""
    solution: str
    """A shell command that does the job."""


def make_task(split: ag.Split, index: int) -> TerminalTask:
    """Create the task of an index; the kinds alternate by index.

    The same arguments always give the same task.
    """
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
    """Reward 1 if the files are as the job requires."""

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
        """Return whether every hidden check finds its right value; half a job earns nothing."""
        return float((await self.sandbox.verify(code=CHECKS, expect=self.task.expect)).ok)


def oracle(task: TerminalTask) -> list[Reply]:
    """Return replies that solve the task; `agentgym check` and the tests play them."""
    return [call("shell", command=task.solution), say("Done.")]

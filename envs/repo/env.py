"""Repo: a bug in a Python repository of several modules, which an issue describes and no visible test detects.

Hidden cases decide the reward. They run in fresh processes on a copy of the repository, without its tests or
configuration, and their values are compared outside the sandbox.
"""

import random
from functools import partial
from typing import Annotated, Any

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call, say
from envs.repo.bugs import BUGS, NEEDS, VISIBLE
from envs.repo.generate import ERROR_OF, OUTCOMES, hidden_tests, part_source, visible_tests

COUNT = 10_000
"""Number of tasks per split."""
PARTS_PER_TASK = 4
PACKAGES = ("acorn", "beacon", "cinder", "dapple", "emblem", "fennel", "gimlet", "hazel", "inkwell", "juniper")
PROMPT = """\
The Python package {package} in your working folder has a bug. Somebody wrote this issue:

> {issue}

Mend the package. Its tests pass, although the bug is there; `python3 -B -m unittest` runs them. Say done when you are
done: hidden tests decide then."""
FilePath = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(min_length=1, max_length=10_000)]


class RepoTask(ag.Task):
    """A repository with a bug, and hidden expressions with their right values."""

    kind: str
    files: dict[str, str]
    path: str
    """The file with the bug."""
    bad: str
    good: str
    """The wrong text in the file, and the right text."""
    hidden: str
    """Code that imports the package and defines the names that the expressions use."""
    expect: dict[str, Any]


def make_task(split: ag.Split, index: int) -> RepoTask:
    """Create the task of an index; the bugs alternate, and no bug is in both splits.

    The same arguments always give the same task.
    """
    rng = random.Random(f"{split} {index}")
    bugs = [bug for bug in BUGS if bug.held_out == (split == "test")]
    bug, package = bugs[index % len(bugs)], rng.choice(PACKAGES)
    parts = [bug.part, *NEEDS.get(bug.part, ())]
    others = [part for part in VISIBLE if part not in [*parts, *NEEDS]]
    parts = sorted(parts + rng.sample(others, PARTS_PER_TASK - len(parts)))
    files = {f"{package}/{part}.py": part_source(part, package) for part in parts}
    files |= {f"tests/test_{part}.py": visible_tests(part, package) for part in parts}
    files |= {f"{package}/__init__.py": f'"""The package {package}."""\n', "tests/__init__.py": ERROR_OF.lstrip()}
    path = f"{package}/{bug.part}.py"
    return RepoTask(
        id=f"repo-{split}-{index}",
        prompt=PROMPT.format(package=package, issue=bug.issue),
        kind=bug.kind,
        files=files | {path: files[path].replace(bug.good, bug.bad)},
        path=path,
        bad=bug.bad,
        good=bug.good,
        hidden=f"from {package} import {', '.join(parts)}\n{OUTCOMES}",
        expect=dict(map(hidden_tests, parts)),
    )


@ag.register("repo")
class Repo(ag.ToolEnv[RepoTask]):
    """Reward 1 if every hidden case of every module is right."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=20, seconds=300, context_tokens=16_384, turn_tokens=4096)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[RepoTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    async def setup(self) -> None:
        await self.sandbox.write(self.task.files)

    @ag.tool(name="list")
    async def list_files(self, folder: FilePath = ".") -> list[str]:
        """List a folder; the names of folders end in a slash."""
        try:
            return await self.sandbox.list(folder)
        except (OSError, ValueError) as error:
            raise ag.ToolError(f"{folder}: {error}") from error

    @ag.tool
    async def read(self, path: FilePath) -> str:
        """Show a file."""
        try:
            return (await self.sandbox.read(path, limit=1 << 16)).decode() or "[empty]"
        except (OSError, ValueError) as error:
            raise ag.ToolError(f"{path}: {error}") from error

    @ag.tool
    async def search(self, text: Text) -> str:
        """Find a text in all files; each line is path:number:line."""
        found = await self.sandbox.exec(["grep", "-rnFI", "--exclude-dir=__pycache__", "-e", text, "."])
        return found.text(limit=4000) if found.stdout else "[not found]"

    @ag.tool
    async def edit(self, path: FilePath, old: Text, new: Annotated[str, Field(max_length=10_000)]) -> str:
        """Replace text in a file; `old` must occur in it exactly once."""
        content = await self.read(path)
        if content.count(old) != 1:
            raise ag.ToolError(f"`old` occurs {content.count(old)} times in {path}; it must occur exactly once")
        await self.sandbox.write({path: content.replace(old, new)})
        return "replaced"

    @ag.tool(timeout_s=40)
    async def run(self, command: Annotated[str, Field(max_length=4000)]) -> str:
        """Run a shell command in the repository."""
        return (await self.sandbox.exec(command, timeout_s=30)).text(limit=4000) or "[no output]"

    @ag.reward
    async def mended(self) -> float:
        """Return whether every hidden case of every module is right."""
        return float((await self.sandbox.verify(code=self.task.hidden, expect=self.task.expect, timeout_s=20)).ok)


def oracle(task: RepoTask) -> list[Reply]:
    """Return replies that solve the task; `agentgym check` and the tests play them."""
    return [call("edit", path=task.path, old=task.bad, new=task.good), say("Done.")]

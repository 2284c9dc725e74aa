"""Code repair: fix a small repository in which some tests fail, with a shell and an editor.

The bugs are seeded mutations of this env's own modules. Hidden cases decide the reward. They enter the sandbox only
after `submit`, in a process that none of the repository's code ran in before, and their right values stay here.
"""

import random
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call
from envs.code_repair.bugs import answers, draw, original, same, visible_tests
from envs.code_repair.cases import CASES
from envs.code_repair.mutate import apply

COUNT = 10_000
"""Number of tasks per split."""
MODULES_PER_TASK = 3
"""Number of modules. One is broken, and the model has to find out which."""
LONGEST = 20_000
"""Largest number of characters that one call writes."""
MAX_SOURCE = 2 * 4 * LONGEST
"""Largest number of bytes read from a file: enough for a whole file of such characters at four bytes each, and for an
edit of the same size.
"""
HIDDEN_S = 5.0
"""Time limit for the hidden cases of one module; a correct one needs milliseconds."""
PROMPT = """\
Some tests of the Python repository in your working folder fail. Find the bug and mend the module; the tests are right.
Its files: {files}
`python3 -B -m unittest` runs the tests. Call submit when you are done: hidden tests decide then."""

FilePath = Annotated[str, Field(min_length=1, max_length=200)]
Content = Annotated[str, Field(max_length=LONGEST)]


class RepairTask(ag.Task):
    """A repository of modules with visible tests, one of them broken."""

    files: dict[str, str]
    modules: tuple[str, ...]
    broken: str
    mistakes: tuple[str, ...]
    """The kind of each mutation."""


@cache
def _tests(name: str) -> str:
    return visible_tests(name)


def make_task(split: ag.Split, index: int) -> RepairTask:
    """Create the task of an index, checked to be broken; the modules alternate by index.

    The same arguments always give the same task.
    """
    rng = random.Random(f"{split} {index}")
    names = sorted(CASES)
    broken = names[index % len(names)]
    bugs = draw(rng, broken, split)
    others = rng.sample([name for name in names if name != broken], MODULES_PER_TASK - 1)
    modules = tuple(sorted([broken, *others]))
    files = {f"{name}.py": original(name) for name in modules} | {f"test_{name}.py": _tests(name) for name in modules}
    files[f"{broken}.py"] = apply(original(broken), bugs)
    prompt = ag.Message(role="user", content=PROMPT.format(files=", ".join(sorted(files))))
    return RepairTask(
        id=f"repair-{split}-{index}",
        prompt=(prompt,),
        files=files,
        modules=modules,
        broken=broken,
        mistakes=tuple(bug.kind for bug in bugs),
    )


@cache
def _probe() -> str:
    return (Path(__file__).parent / "probe.py").read_text()


@ag.register("code_repair")
class CodeRepair(ag.ToolEnv[RepairTask]):
    """Reward 1 if every hidden case of every module is right after `submit`, minus 0.1 for each malformed call."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=16, seconds=300, context_tokens=16_384, turn_tokens=4096)

    def __init__(self, task: RepairTask) -> None:
        super().__init__(task)
        self.submitted = False

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[RepairTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    async def setup(self) -> None:
        await self.sandbox.write(self.task.files)

    @ag.tool(timeout_s=30)
    async def bash(self, cmd: Annotated[str, Field(max_length=4000)]) -> str:
        """Run a shell command in the repository."""
        return (await self.sandbox.exec(cmd, timeout_s=20)).text(limit=4000)

    @ag.tool
    async def read(self, path: FilePath) -> str:
        """Show a file."""
        return (await self._text(path)) or "[empty]"

    @ag.tool
    async def write(self, path: FilePath, content: Content) -> str:
        """Write a whole file."""
        await self._put(path, content)
        return "written"

    @ag.tool
    async def edit(self, path: FilePath, old: Content, new: Content) -> str:
        """Replace text in a file; `old` must occur in it exactly once."""
        text = await self._text(path)
        found = text.count(old) if old else 0
        if found != 1:
            raise ag.ToolError(f"`old` occurs {found} times in {path}; it must occur exactly once")
        await self._put(path, text.replace(old, new))
        return "replaced"

    @ag.tool
    def submit(self) -> ag.Stop:
        """Finish; the hidden tests run next."""
        self.submitted = True
        return ag.Stop("submitted")

    @ag.reward
    async def solved(self) -> float:
        """Return whether the repository was submitted and every hidden case of every module is right."""
        if not self.submitted:
            return 0.0
        try:
            sources = {name: await self._text(f"{name}.py") for name in self.task.modules}
        except ag.ToolError:
            return 0.0
        changed = {name: source for name, source in sources.items() if source != original(name)}
        return float(not changed or await self._are_right(changed))

    @ag.reward(weight=-0.1)
    def malformed(self) -> float:
        """Return how many calls were malformed; without this cost, malformed calls would not be unlearned."""
        return self.metrics["malformed_calls"]

    async def _are_right(self, sources: dict[str, str]) -> bool:
        """Return whether each module, alone in a fresh process, gives the right values for its hidden cases.

        Its code can output anything there. It never learns the right values, so it can only pass by returning them.
        """
        expect = {
            f"outcomes({source!r}, {list(CASES[name].hidden)!r})": partial(same, answers(name, hidden=True))
            for name, source in sources.items()
        }
        return (await self.sandbox.verify(code=_probe(), expect=expect, timeout_s=HIDDEN_S * len(sources))).ok

    async def _text(self, path: str) -> str:
        try:
            return (await self.sandbox.read(path, limit=MAX_SOURCE)).decode()
        except (OSError, ValueError) as error:
            raise ag.ToolError(f"{path}: {error}") from error

    async def _put(self, path: str, content: str) -> None:
        try:
            await self.sandbox.write({path: content})
        except (OSError, ValueError) as error:
            raise ag.ToolError(f"{path}: {error}") from error


def oracle(task: RepairTask) -> list[Reply]:
    """Return replies that restore the broken module; `agentgym check` and the tests play them."""
    return [call("write", path=f"{task.broken}.py", content=original(task.broken)), call("submit")]

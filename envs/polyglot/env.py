"""Polyglot: each task is one broken program in a separate image that has the program's language.

The images are built from the folders in `images/`, or are any others with a program at the same path. Hidden inputs
decide the reward; their right outputs never enter the sandbox.
"""

from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call

REPOSITORY = "agentgym-polyglot"
"""Repository of the images; the tag is the folder's name."""
PROGRAM = "program"
PROMPT = """\
`{program}` in your working folder should do this: {wanted}. It does not always. Mend it, and keep its language.
`./{program}` runs it. Call submit when you are done: hidden inputs decide then."""

WANTED = {
    "python": "print the median of the numbers on standard input as a decimal number (`2.0`); where there is an even "
    "number of them, the mean of the two in the middle",
    "perl": "print each line of standard input with its words in the opposite order",
    "shell": "print how many different words standard input has",
}
TRAIN = {
    "python": {"3 1 2": "2.0", "4 1 3 2": "2.5", "7": "7.0", "1 1 5 9": "3.0"},
    "perl": {"a b c": "c b a", "one two": "two one", "x": "x", "b a\nc d e": "a b\ne d c"},
    "shell": {"a b a": "2", "a": "1", "x y\ny z": "3"},
}
TEST = {
    "python": {"10 20": "15.0", "5 4 3 2 1": "3.0", "-1 1": "0.0"},
    "perl": {"z y x w": "w x y z", "the end\n": "end the"},
    "shell": {"to be or not to be": "4", "b b\nb": "1", "a b a": "2"},
}
"""Hidden inputs by language, with their right outputs. Both splits have the same programs and the same bugs."""

MENDED = {
    "python": "#!/usr/bin/env python3\nimport statistics, sys\n"
    "print(float(statistics.median(float(word) for word in sys.stdin.read().split())))\n",
    "perl": '#!/usr/bin/perl\nwhile (<STDIN>) { print join(" ", reverse split), "\\n" }\n',
    "shell": "#!/bin/sh\ntr -s ' \\t' '\\n\\n' | sort -u | grep -c .\n",
}
"""Correct programs by language; they never enter the sandbox."""


class PolyglotTask(ag.Task):
    """An image with a broken program, and the hidden inputs with their outputs."""

    image: str
    """Any image of the engine that has the program at /task/program."""
    hidden: dict[str, str]


def make_task(split: ag.Split, language: str) -> PolyglotTask:
    """Create the task of a language, with the image that the README says how to build."""
    prompt = ag.Message(role="user", content=PROMPT.format(program=PROGRAM, wanted=WANTED[language]))
    hidden = (TRAIN if split == "train" else TEST)[language]
    return PolyglotTask(
        id=f"polyglot-{split}-{language}", prompt=(prompt,), image=f"{REPOSITORY}:{language}", hidden=hidden
    )


@ag.register("polyglot")
class Polyglot(ag.ToolEnv[PolyglotTask]):
    """Reward: the share of hidden inputs that the program handles right after `submit`."""

    limits = ag.Limits(turns=12, seconds=180)

    def __init__(self, task: PolyglotTask) -> None:
        super().__init__(task)
        self.submitted = False

    @classmethod
    def tasks(cls, split: ag.Split) -> list[PolyglotTask]:
        return [make_task(split, language) for language in WANTED]

    @classmethod
    def sandbox_for(cls, task: PolyglotTask) -> ag.Docker:
        return ag.Docker(image=task.image)

    async def setup(self) -> None:
        copied = await self.sandbox.exec(f"cp /task/{PROGRAM} . && chmod 755 {PROGRAM}")
        if not copied.ok:
            raise RuntimeError(f"the image {self.task.image!r} has no /task/{PROGRAM}: {copied.text()}")

    @ag.tool(timeout_s=30)
    async def bash(self, cmd: Annotated[str, Field(max_length=4000)]) -> str:
        """Run a shell command in the working folder."""
        return (await self.sandbox.exec(cmd, timeout_s=20)).text(limit=4000)

    @ag.tool
    async def write(self, content: Annotated[str, Field(max_length=20_000)]) -> str:
        """Write the whole program anew."""
        await self.sandbox.write({PROGRAM: content})
        return "written"

    @ag.tool
    def submit(self) -> ag.Stop:
        """Finish; the hidden inputs are tried next."""
        self.submitted = True
        return ag.Stop("submitted")

    @ag.reward
    async def right(self) -> float:
        """Return the share of hidden inputs with the right output, or 0 if nothing was submitted."""
        if not self.submitted:
            return 0.0
        verdict = await self.sandbox.verify(command=f"chmod 755 {PROGRAM}; ./{PROGRAM}", expect=self.task.hidden)
        return verdict.fraction


def oracle(task: PolyglotTask) -> list[Reply]:
    """Return replies that write a correct program; `agentgym check` and the tests play them."""
    return [call("write", content=MENDED[task.id.rpartition("-")[2]]), call("submit")]

"""The Python blocks of docs/training.md run as they are printed."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)

MY_ENV = '''
import agentgym as ag


class Bugfix(ag.ToolEnv[ag.Task]):
    """An env without a box, in the place of the README's."""

    limits = ag.Limits(turns=1)

    @classmethod
    def tasks(cls, split):
        numbers = range(4) if split == "train" else range(4, 6)
        return ag.Procedural(lambda i: ag.Task(id=f"t{i}", prompt="Say yes."), numbers)

    @ag.tool
    async def look(self) -> str:
        """Look around."""
        return "nothing"

    @ag.reward
    def brief(self) -> float:
        return -float(len(self.answer or ""))
'''

CONTEXT = {
    "class BugfixGRPO(": "",
    "ag.train_policy(": """
from functools import partial
from bugfix_grpo import BugfixGRPO
small = dict(out="runs/mine", prompts=2, group_size=2, eval_tasks=0, max_tokens=4)
BugfixGRPO = partial(BugfixGRPO, engine=ag.LocalConfig(slots=2), **small)
""",
    "ag.evaluate(": "",
    "ag.Scheduler(": """
from itertools import count
from my_env import Bugfix
from agentgym.engines.scripted import Scripted, say
engine, tasks = Scripted(lambda *_: say("yes")), iter(Bugfix.tasks("train"))
""",
    "trainer.resume(": "from agentgym.testing import sample\nsamples = [sample()]\n",
    "PeftModel.from_pretrained(": "from agentgym.models import find_model\nbase = find_model('tiny')\n",
    "ag.demonstrations(": """
from my_env import Bugfix
from agentgym.engines.scripted import Scripted, say
played = [await ag.rollout(Bugfix, Bugfix.tasks("train")[0], Scripted([say("yes")]))]
""",
}
"""What stands before a block of the page, found by a part of it: names that the page leaves to the reader."""

AFTER = {
    "ag.train_policy(": "class BugfixGRPO(",
    "ag.evaluate(": "ag.train_policy(",
    "PeftModel.from_pretrained(": "ag.train_policy(",
}
"""The block whose files another block needs."""


@dataclass(frozen=True)
class Reader:
    """A folder, and the blocks that were run in it."""

    folder: Path
    ran: set[str] = field(default_factory=set)

    async def run(self, part: str) -> None:
        """Run a block behind the one that it needs; what has run in the folder is not run again."""
        if part in AFTER:
            await self.run(AFTER[part])
        if part in self.ran:
            return
        (block,) = (block for block in BLOCKS if part in block)
        if block.startswith("# bugfix_grpo.py"):
            (self.folder / "bugfix_grpo.py").write_text(block)
        names = await run(CONTEXT[part], {"ag": ag, "__name__": "docs"})
        await run(block, names)
        self.ran.add(part)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader's folder, which holds an env and can be imported from."""
    made = tmp_path_factory.mktemp("reader")
    (made / "my_env.py").write_text(MY_ENV)
    sys.path.insert(0, str(made))
    yield Reader(made)
    sys.path.remove(str(made))
    for name in ("my_env", "bugfix_grpo"):
        sys.modules.pop(name, None)


async def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the code, in which `await` may stand outside of functions."""
    compiled = compile(code, "docs/training.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waiting = eval(compiled, names)
    if inspect.iscoroutine(waiting):
        await waiting
    return names


def test_every_setting_of_the_trainer_is_explained() -> None:
    page = (ROOT / "docs/training.md").read_text()
    flags = [setting.name.replace("_", "-") for setting in fields(ag.TrainConfig)]
    assert [flag for flag in flags if not re.search(rf"(--train\.|`){flag}\b", page)] == []


def test_every_block_has_its_context_and_every_context_its_block() -> None:
    assert [sum(part in block for part in CONTEXT) for block in BLOCKS] == [1] * len(BLOCKS)
    assert len(BLOCKS) == len(CONTEXT)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks by the old name
@pytest.mark.parametrize("part", CONTEXT)
async def test_a_block_runs(part: str, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader.folder)
    await reader.run(part)

"""The Python blocks of docs/training.md run as printed."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from tests.docs.blocks import needs_sandbox, write_walkthrough_files

ROOT = Path(__file__).parents[2]
OWN = ("my_env", "train_pointers", "train_longer")
"""The modules in the reader's folder."""
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)

CONTEXT = {
    "RECIPE = replace(POINTERS": "",
    "ag.train_policy(": """
from dataclasses import replace
import train_longer
small = dict(prompts_per_step=2, group_size=2, eval_tasks=2)
train_longer.RECIPE = replace(train_longer.RECIPE, engine=ag.TransformersConfig(slots=2), **small)
""",
    "RolloutStore(": "",
    "result.pass_at(": "",
    "BOTH = replace(": "",
    "ids_solved(": "",
    "Scheduler(": """
from agentgym.engines.scripted import Scripted, say
engine = Scripted(lambda *_: say("yes"))
""",
    "sync.begin(": "from agentgym.testing import sample\nsamples = [sample()]\n",
    "trainer.resume(": "from agentgym.testing import sample\nsamples = [sample()]\n",
    "AutoPeftModelForCausalLM": "",
    "branching = ag.BranchingConfig(": "",
    "value_samples(groups": "",
    "demonstrations(": """
from agentgym.engines.scripted import Scripted, say
from agentgym.testing import FakeSandboxPool
played = [await ag.rollout(Pointers, Pointers.tasks("train")[0], Scripted([say("yes")]), sandboxes=FakeSandboxPool())]
""",
}
"""Code that runs before a block, found by a part of the block: it defines names that the page leaves to the reader."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create the folder of a reader who has followed the README."""
    made = tmp_path_factory.mktemp("reader")
    write_walkthrough_files(made)
    sys.path.insert(0, str(made))
    for name in OWN:
        sys.modules.pop(name, None)
    yield made
    sys.path.remove(str(made))
    for name in OWN:
        sys.modules.pop(name, None)


async def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the code, in which `await` may occur outside of functions."""
    compiled = compile(code, "docs/training.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waiting = eval(compiled, names)
    if inspect.iscoroutine(waiting):
        await waiting
    return names


def test_every_setting_of_the_trainer_is_explained() -> None:
    page = (ROOT / "docs/training.md").read_text()
    flags = [field.name.replace("_", "-") for field in fields(ag.TrainConfig)]
    assert [flag for flag in flags if not re.search(rf"(--train\.|`){flag}\b", page)] == []


def test_each_block_has_one_context_and_each_context_one_block() -> None:
    assert [sum(part in block for part in CONTEXT) for block in BLOCKS] == [1] * len(BLOCKS)
    assert len(BLOCKS) == len(CONTEXT)


@pytest.mark.slow
@needs_sandbox
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses the old name
async def test_the_blocks_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"ag": ag, "__name__": "docs"}
    for block in BLOCKS:
        if block.startswith("# train_longer.py"):
            (folder / "train_longer.py").write_text(block)
        [context] = [text for part, text in CONTEXT.items() if part in block]
        await run(context, names)
        await run(block, names)
    adapter = Path(names["summary"]["output_dir"], "adapter")
    assert adapter.is_relative_to(folder / "runs/pointers_longer")
    assert (adapter / "adapter_config.json").exists()

"""The Python blocks of the pages on training run as they are printed, in the order of the pages."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from tests.docs.blocks import DOCS, TRAINING, Block, blocks_of, needs_sandbox, write_walkthrough_files

OWN = ("my_env", "train_pointers", "train_longer")
"""The modules of the reader's folder."""
LONGEST = 250
"""Most lines of a page."""
BLOCKS = [block for page in TRAINING for block in blocks_of(DOCS / page)]

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
"""The code to run before a block, by a text that only this block has; it sets names that the page leaves open."""


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


async def run(block: Block, names: dict[str, Any]) -> None:
    """Run the block, in which `await` may be outside of functions."""
    waiting = eval(block.compiled(), names)
    if inspect.iscoroutine(waiting):
        await waiting


def test_every_setting_of_the_trainer_is_explained() -> None:
    pages = "\n".join((DOCS / page).read_text() for page in TRAINING)
    flags = [field.name.replace("_", "-") for field in fields(ag.TrainConfig)]
    assert [flag for flag in flags if not re.search(rf"(--train\.|`){flag}\b", pages)] == []


def test_every_block_has_its_context_and_every_context_its_block() -> None:
    found = [[part for part in CONTEXT if part in block.text] for block in BLOCKS]
    assert [f"{block.guide}:{block.line}" for block, parts in zip(BLOCKS, found, strict=True) if len(parts) != 1] == []
    assert sorted(part for parts in found for part in parts) == sorted(CONTEXT)


@pytest.mark.parametrize("page", TRAINING)
def test_a_page_stays_short(page: str) -> None:
    assert len((DOCS / page).read_text().splitlines()) <= LONGEST


@pytest.mark.slow
@needs_sandbox
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses the old name
async def test_the_blocks_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"ag": ag, "__name__": "docs"}
    for block in BLOCKS:
        if block.text.startswith("# train_longer.py"):
            (folder / "train_longer.py").write_text(block.text)
        [context] = [text for part, text in CONTEXT.items() if part in block.text]
        await run(replace(block, text=context), names)
        await run(block, names)
    adapter = Path(names["summary"]["output_dir"], "adapter")
    assert adapter.is_relative_to(folder / "runs/pointers_longer")
    assert (adapter / "adapter_config.json").exists()

"""The page on pretrained models: its commands run in order, and SmolLM2 starts from a reward that it can learn from."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentgym.cli import main as cli
from agentgym.testing import check_env, say
from recipes.real_models import SMOLLM2
from tests.docs.blocks import DOCS, files_in

PAGE = DOCS / "real-models.md"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL = {
    "eval": "--n 4 --max-tokens 8",
    "train": "--max-steps 1 --prompts-per-step 2 --group-size 2 --eval-tasks 2",
}
"""Flags that make a command short."""


@pytest.fixture
def largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the page's module, in a folder that is the current one."""
    [(name, text)] = files_in(PAGE).items()
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "largest", raising=False)
    return __import__("largest")


def commands() -> list[str]:
    """Return the page's commands in order, without the installation."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("agentgym ")]


def follow(folder: Path, model: str, flags: dict[str, str]) -> None:
    """Run the page's commands, with another model and further flags."""
    for command in commands():
        for kind in ("eval-Largest", "Largest"):
            for made in sorted((folder / "runs" / kind).glob("*"))[:1]:
                command = command.replace(f"runs/{kind}/TIME", f"runs/{kind}/{made.name}")
        words = shlex.split(command.replace(HUB_NAME, model))[1:]
        assert cli.main([*words, *shlex.split(flags.get(words[0], ""))]) == 0, command


async def test_the_env_of_the_page_keeps_the_contract_of_an_env(largest: Any) -> None:
    task = largest.make_task(0)
    await check_env(largest.Largest, task, oracle=[say(str(task.largest))])


def test_the_commands_of_the_page_run_in_order(largest: Any, tmp_path: Path) -> None:
    follow(tmp_path, "tiny", SMALL)
    assert (tmp_path / "largest-model" / "config.json").is_file()


@pytest.mark.models
def test_smollm2_starts_from_a_reward_that_it_can_learn_from(largest: Any, tmp_path: Path) -> None:
    if not SMOLLM2.folder.is_dir():
        pytest.skip("`make models` fetches the model")
    assert cli.main(["eval", "largest:Largest", "--model", str(SMOLLM2.folder), "--output-dir", "runs/start"]) == 0
    reward = json.loads((tmp_path / "runs/start/summary.json").read_text())["reward"]
    assert 0.05 <= reward <= 0.5, reward

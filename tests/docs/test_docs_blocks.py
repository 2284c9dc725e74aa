"""The code in the docs: it runs as printed, or at least compiles if it can't run here."""

import ast
import asyncio
import importlib
import inspect
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agentgym as ag
from agentgym.environments.registry import gallery
from agentgym.errors import SandboxError
from agentgym.train import Trainer
from tests.docs.blocks import (
    DOCS,
    FILES,
    NOT_RUN,
    PACKAGES,
    ROOT,
    RUN,
    TRAINING,
    Block,
    blocks_of,
    lacks_a_sandbox,
    names_of,
    write_walkthrough_files,
)

ALL = [block for guide in sorted(DOCS.glob("**/*.md")) for block in blocks_of(guide)]
GUIDES = [
    *sorted(DOCS.glob("**/*.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "sandbox/README.md")),
]
NAME = re.compile(r"`((?:ag|agentgym)\.[A-Za-z_.]*[A-Za-z_])")
"""Names from the library in inline code, such as `ag.Env` and `agentgym.testing`."""
ADAPTER = re.compile(r"runs/[\w/]+/adapter\b")
IN_A_CHECKOUT = re.compile(r"(?:-m |import |from |\")(?:recipes|envs|benchmarks)\.\w|make test-")
"""Modules and make targets that exist only in a checkout, since the wheel doesn't install them."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def named(block: Block) -> str:
    return f"{block.guide}:{block.line}"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an adapter of the tiny model, as a run saves it."""
    folder = tmp_path_factory.mktemp("run") / "adapter"

    async def save() -> None:
        async with Trainer("tiny", ag.TrainConfig()) as trainer:
            trainer.save(folder)

    asyncio.run(save())
    return folder


async def run_block(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block, and then the tests that it defines."""
    before = set(namespace)
    work = eval(block.compiled(), namespace)
    if inspect.isawaitable(work):
        await work
    for name in sorted(set(namespace) - before):
        if name.startswith("test_"):
            test = namespace[name]
            await test(**dict.fromkeys(inspect.signature(test).parameters))


@pytest.mark.parametrize("guide", RUN)
def test_the_blocks_of_a_guide_run_in_order(
    guide: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: Path
) -> None:
    for package in PACKAGES.get(guide, ()):
        pytest.importorskip(package, reason=f"needs the package {package}")
    module = ModuleType(f"guide_{guide.removesuffix('.md')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    write_walkthrough_files(tmp_path)
    for path in ADAPTER.findall((DOCS / guide).read_text()):
        shutil.copytree(adapter, tmp_path / path, dirs_exist_ok=True)
    failed: list[str] = []
    no_sandbox: list[str] = []
    for block in blocks_of(DOCS / guide):
        if block.why_not_run is None:
            try:
                asyncio.run(run_block(block, vars(module)))
            except SandboxError as error:
                (no_sandbox if lacks_a_sandbox() else failed).append(f"{named(block)}: {error}")
            except Exception as error:
                failed.append(f"{named(block)}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    assert list(temporary.iterdir()) == []  # a reader's machine keeps what an example forgets
    if no_sandbox:
        pytest.skip("\n".join(no_sandbox))


def test_every_page_with_blocks_is_one_whose_blocks_run() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md") if blocks_of(page)}
    assert sorted(pages) == sorted((*RUN, *TRAINING, *FILES))


@pytest.mark.parametrize("block", ALL, ids=named)
def test_each_block_compiles_and_names_only_what_exists(block: Block) -> None:
    for package in PACKAGES.get(block.guide, ()):
        pytest.importorskip(package, reason=f"needs the package {package}")
    tree = block.tree()
    missing = [name for name in names_of(tree, "ag") if not hasattr(ag, name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("agentgym"):
            importlib.import_module(node.module)
            missing += [alias.name for alias in node.names if not is_there(f"{node.module}.{alias.name}")]
    assert not missing, f"{named(block)} uses names that agentgym does not have: {missing}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_the_names_in_a_guides_text_exist(guide: Path) -> None:
    for package in PACKAGES.get(guide.name, ()):
        pytest.importorskip(package, reason=f"needs the package {package}")
    missing = [name for name in NAME.findall(guide.read_text()) if not is_there(name.removesuffix(".py"))]
    assert not missing


def is_there(name: str) -> bool:
    """Return whether the name exists: `ag.X`, a module of agentgym, or an attribute of one."""
    module, *rest = name.replace("ag.", "agentgym.", 1).split(".") if name.startswith("ag.") else name.split(".")
    found: Any = importlib.import_module(module)
    for part in rest:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        found = getattr(found, part)
    return True


def test_the_evaluation_guide_uses_envs_that_a_reader_has() -> None:
    guide = (DOCS / "evaluation.md").read_text()
    named = set(re.findall(r"^agentgym eval (\S+)", guide, re.MULTILINE))
    assert named
    assert named <= {"my_env:Pointers", *gallery()}


@pytest.mark.parametrize("text", NOT_RUN)
def test_each_reason_for_not_running_a_block_belongs_to_one_block(text: str) -> None:
    held = [named(block) for block in ALL if text in block.text and block.guide in RUN]
    assert len(held) == 1, held


@pytest.mark.parametrize("guide", [ROOT / "README.md", *GUIDES], ids=lambda guide: str(guide.relative_to(ROOT)))
def test_adapter_paths_in_the_docs_are_those_that_a_run_writes(guide: Path) -> None:
    wrong = [path for path in ADAPTER.findall(guide.read_text()) if not re.fullmatch(r"runs/\w+/TIME/adapter", path)]
    assert not wrong, "a run writes runs/RECIPE/TIME/adapter"


@pytest.mark.parametrize("guide", sorted(DOCS.glob("*.md")), ids=lambda guide: str(guide.relative_to(ROOT)))
def test_parts_that_exist_only_in_a_checkout_are_marked_as_such(guide: Path) -> None:
    sections = re.split(r"^(?=## )", guide.read_text(), flags=re.MULTILINE)
    silent = [part.partition("\n")[0] for part in sections if IN_A_CHECKOUT.search(part) and "checkout" not in part]
    assert not silent or "checkout" in sections[0], silent


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_the_links_of_a_guide_work(guide: Path) -> None:
    wrong = [target for target in LINK.findall(guide.read_text()) if not leads_somewhere(guide, target)]
    assert not wrong


def leads_somewhere(guide: Path, target: str) -> bool:
    """Return whether a link's file and heading exist; links to other hosts are not followed."""
    if target.startswith(("https://", "http://")):
        return True
    path, _, heading = target.partition("#")
    found = (guide.parent / path).resolve() if path else guide
    return found.exists() and (not heading or heading in headings(found))


def headings(guide: Path) -> set[str]:
    """Return the headings of a guide as links spell them."""
    lines = re.findall(r"^#+ (.*)$", guide.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}

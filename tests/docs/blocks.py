"""The Python blocks of the docs: where they are, what they need, and which of them can't run here."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes.choose import auto
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN = tuple(
    f"{name}.md"
    for name in (
        "agents",
        "bridges",
        "comparing",
        "contexts",
        "data",
        "docker",
        "endpoints",
        "engines",
        "environments",
        "evaluation",
        "games",
        "hidden-tests",
        "instance-tools",
        "kits",
        "limits",
        "mcp-server",
        "models",
        "names",
        "networks",
        "own-engine",
        "own-loss",
        "own-sandbox",
        "resources",
        "rewards",
        "rollouts",
        "sandbox-images",
        "sandbox-settings",
        "sandboxes",
        "self-play",
        "sglang",
        "testing",
        "tools",
        "vision",
    )
)
"""The guides whose blocks run in order, each guide in a separate namespace."""
TRAINING = ("training.md", "runs.md", "tasks.md", "credit.md", "losses.md", "trainer.md", "async.md")
"""The pages on training, whose blocks run in this order in one namespace (tests/docs/test_training_docs.py)."""
FILES = ("tutorial.md", "walkthrough.md", "real-models.md")
"""The pages whose blocks are files or parts of files, which other tests run."""
PACKAGES = {
    "bridges.md": ("gymnasium", "pettingzoo"),
    "instance-tools.md": ("jsonschema", "mcp"),
    "kits.md": ("datasets",),
    "mcp-server.md": ("mcp",),
}
"""Optional packages that the blocks of a guide need."""
NOT_RUN = {
    "rows = datasets.load_dataset(": "needs the package `datasets` and the network",
    "engine = ag.Endpoint(": "needs the network and a key",
    "SGLangEngine.launch(": "needs SGLang servers and a GPU",
    "policy = await engine.push(": "needs SGLang servers and a GPU",
    "trainer = trl.GRPOTrainer(": "needs the network, and time: a slow test takes such a step",
}
"""A text that occurs in exactly one block, and why that block is compiled but not run."""


def files_in(page: Path) -> dict[str, str]:
    """Return the Python files that a page prints, by the name in their first line."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return {block.partition("\n")[0].removeprefix("# "): block for block in blocks}


def write_walkthrough_files(folder: Path) -> None:
    """Write the walkthrough's files into a folder, as a reader of the guides would."""
    for name, text in files_in(DOCS / "walkthrough.md").items():
        (folder / name).write_text(text)


def no_sandbox() -> bool:
    """Return whether this machine has neither Docker nor bubblewrap."""
    try:
        auto()
    except SandboxError:
        return True
    return False


def lacks_a_sandbox() -> bool:
    """Return whether this machine lacks Docker or bubblewrap, so that a guide's block may find no sandbox."""
    return why_no_docker() is not None or why_no_bubblewrap() is not None


needs_sandbox = pytest.mark.skipif(no_sandbox(), reason="no Docker and no bubblewrap on this machine")


@dataclass(frozen=True)
class Block:
    """One Python block of a guide, and the line that it starts on."""

    guide: str
    line: int
    text: str

    @property
    def why_not_run(self) -> str | None:
        """Why the block can't run in a test, or None if it can."""
        return next((why for text, why in NOT_RUN.items() if text in self.text), None)

    def tree(self) -> ast.Module:
        """Return the parsed block, with the guide's line numbers; a top-level `await` is allowed."""
        made = compile(self.text, self.guide, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        assert isinstance(made, ast.Module)
        return ast.increment_lineno(made, self.line - 1)

    def compiled(self) -> CodeType:
        """Return the block as code; with a top-level `await`, evaluating it returns a coroutine."""
        made = compile(self.tree(), self.guide, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        assert isinstance(made, CodeType)
        return made


def blocks_of(guide: Path) -> list[Block]:
    """Return the Python blocks of a guide, in order."""
    text = guide.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Block(guide.name, text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def names_of(tree: ast.Module, name: str) -> list[str]:
    """Return the attributes that a block reads from the module called `name`."""
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    ]

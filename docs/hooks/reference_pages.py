"""The pages of the site that are made from the code: commands, settings, and the names of the library."""

import ast
import contextlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import agentgym as ag
from agentgym.cli.main import COMMANDS, main

WIDTH = "84"
"""Columns of a command's help."""
SETTINGS = {
    "A run": ("RunConfig", "OversampleConfig", "BranchingConfig", "GAEConfig", "ModelRoleConfig"),
    "The trainer": ("TrainConfig",),
    "Engines": ("TransformersConfig", "SGLangConfig", "CustomEngineConfig", "Sampling"),
    "Environments": ("Limits", "Compact", "Window"),
    "Sandboxes": ("Docker", "Bubblewrap", "AnySandbox", "Process", "Service", "Allow"),
}
"""The classes whose fields are settings, by the heading that they stand under."""
NAMES = {
    "environments": ("environments", "tools", "data", "agent_api", "sandboxes", "judges"),
    "rollouts": ("types", "rollouts", "scheduling", "samples", "advantages", "errors"),
    "engines": ("engines", "chat"),
    "training": ("train", "weight_sync", "run", "launch", "cli"),
    "evaluation": ("evals", "store", "exports"),
}
"""The rooms whose public names stand on one page."""
MODULES = {
    "testing": ("agentgym.testing",),
    "evaluation": ("agentgym.store.reader.RolloutStore",),
}
"""What stands on a page beside the names of the library's face."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages."""
    made = {"reference/commands.md": commands(), "reference/settings.md": settings()}
    made |= {f"reference/api/{page}.md": text for page, text in api().items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def commands() -> str:
    """Return the page of the commands: what each prints for `--help`."""
    parts = ["# Commands", "What each command prints for `--help`.", f"```text\n{help_of('')}```"]
    for words in _paths(COMMANDS):
        parts += [f"## agentgym {words}", f"```text\n{help_of(words)}```"]
    return "\n\n".join(parts) + "\n"


def help_of(words: str) -> str:
    """Return what a command prints for `--help`, without colors."""
    said = io.StringIO()
    kept = dict(os.environ)
    os.environ |= {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*words.split(), "--help"])
    finally:
        os.environ.clear()
        os.environ |= kept
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue()).strip("\n").split("\n")
    return "\n".join(wrapped for line in lines for wrapped in _wrapped(line)) + "\n"


def _wrapped(line: str) -> list[str]:
    """Return the line in pieces of at most WIDTH columns. A command's help is printed as one long line."""
    return textwrap.wrap(line, int(WIDTH), break_on_hyphens=False) if len(line) > int(WIDTH) else [line]


def _paths(given: Mapping[str, Any], before: str = "") -> list[str]:
    found: list[str] = []
    for name, command in given.items():
        words = f"{before} {name}".strip()
        found += _paths(command, words) if isinstance(command, Mapping) else [words]
    return found


def settings() -> str:
    """Return the page of the settings: each field with its default and its docstring."""
    parts = ["# Settings", "A recipe sets them by name, the command line with a flag of the same name."]
    for heading, names in SETTINGS.items():
        parts.append(f"## {heading}")
        for name in names:
            rows = fields_of(getattr(ag, name))
            parts += [f"### {name}", "| setting | default | meaning |\n|---|---|---|\n" + "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def fields_of(cls: type) -> list[str]:
    """Return a row of the table for each field that has a docstring, those of the bases first."""
    rows: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("agentgym"):
            continue
        [body] = [node for node in ast.parse(inspect.getsource(base)).body if isinstance(node, ast.ClassDef)]
        for field, said in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(said):
                default = "" if field.value is None else f"`{_cell(_default(field.value))}`"
                rows[field.target.id] = f"| `{field.target.id}` | {default} | {_cell(_text(said))} |"
    return list(rows.values())


def _default(value: ast.expr) -> str:
    """Return a field's default as a reader would write it: what a factory makes in the place of the factory."""
    text = ast.unparse(value)
    made = re.fullmatch(r"field\(default_factory=(.*)\)", text)
    return {"dict": "{}", "list": "[]"}.get(made[1], f"{made[1]}()") if made else text


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _text(node: ast.stmt) -> str:
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def api() -> dict[str, str]:
    """Return the pages of the library's names, each with a directive for every name of its rooms."""
    stubs = sorted(Path(ag.__file__).parent.rglob("__init__.pyi"))
    homes = {home for stub in stubs for home in _named(stub)}
    made: dict[str, str] = {}
    for page in (*NAMES, "testing"):
        chosen = sorted(home for home in homes if home.split(".")[1] in NAMES.get(page, ()))
        text = "\n\n".join(f"::: {path}" for path in (*chosen, *MODULES.get(page, ())))
        made[page] = f"# {page.capitalize()}\n\n{text}\n"
    return made


def _named(stub: Path) -> Iterator[str]:
    """Yield where each name of a package's public names is defined."""
    package = ".".join(stub.parent.relative_to(Path(ag.__file__).parents[1]).parts)
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{package}.{node.module}.{name.name}" for name in node.names)

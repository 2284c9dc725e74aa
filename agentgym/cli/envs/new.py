"""The command `agentgym new`: creates the folder of a new environment, with a README and a test."""

import ast
import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import tyro

from agentgym.cli.output import say
from agentgym.errors import AgentGymError
from agentgym.files.names import command

Kind = Literal["tool", "sandbox", "chat", "game"]
TRAINED: Mapping[Kind, tuple[str, ...]] = {
    "tool": (),
    "sandbox": ("--model", "Qwen/Qwen3-0.6B"),
    "chat": ("--model", "Qwen/Qwen3-0.6B"),
    "game": ("--credit", "turn"),
}
"""For each kind of template, the flags of `agentgym train` in its README. The tiny model can't learn every kind."""
SUFFIXES = (".py", ".md")
"""File types in a template; other files in its folder are leftovers of a program that ran there."""


def new(folder: tyro.conf.Positional[Path], kind: Kind = "tool") -> int:
    """Create the folder of a new environment with env.py, README.md and a test that passes.

    For example:
    $ agentgym new hello
    $ agentgym new mend_code --kind sandbox

    Args:
        folder: The folder to create. Its last part is the environment's name, as in hello or envs/my_shop.
        kind: The template: tool has one tool and one reward, sandbox runs code in a sandbox, chat replies to the
            model like a user, and game rewards each turn.
    """
    template = templates() / kind
    texts = {path.name: path.read_text() for path in sorted(template.iterdir()) if path.suffix in SUFFIXES}
    try:
        refuse_folder(folder, kind, texts)
        made = {target(file, kind, folder.name): renamed(text, kind, folder.name) for file, text in texts.items()}
        _write(folder, made)
    except FileNotFoundError as error:
        raise AgentGymError(f"folder: there is no folder {folder.parent}; create it first") from error
    except OSError as error:
        raise AgentGymError(f"folder: {folder} cannot be created ({error.strerror}); choose another folder") from error
    for file in made:
        say(f"wrote {folder / file}")
    test, of = shlex.join(["pytest", str(folder)]), str(folder) if len(folder.parts) > 1 else folder.name
    say(f"next: {test}; then {command('check', of)}, {command('play', of)} and {command('train', of, *TRAINED[kind])}")
    return 0


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Create the new folder with these files, and remove it if that fails."""
    folder.mkdir()
    try:
        for file, text in texts.items():
            (folder / file).write_text(text)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def refuse_folder(folder: Path, kind: Kind, texts: Mapping[str, str]) -> None:
    """Raise AgentGymError if the folder exists, or if its name can't be the name of a new environment.

    Args:
        folder: The folder.
        kind: The kind of the template.
        texts: The template's files, whose code may already use the name of the new class.
    """
    if os.path.lexists(folder):
        raise AgentGymError(f"folder: {folder} already exists; choose another name, or remove it first")
    refuse_name(folder.name)
    if (cls := class_name(folder.name)) in names_in(texts) - {f"{kind.title()}Template", f"{kind.title()}Task"}:
        raise AgentGymError(
            f"folder: the class of {folder.name} would be called {cls}, which is another name in the template; choose "
            f"another name, such as my_{folder.name}"
        )
    if (file := folder.with_name(f"{folder.name}.py")).exists():
        raise AgentGymError(
            f"folder: {folder} would hide the file {file}: Python would import the folder instead; choose another name"
        )


def refuse_name(name: str) -> None:
    """Raise AgentGymError if the name isn't valid for a Python package and its class, or another package has it."""
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None or any(map(keyword.iskeyword, (name, class_name(name)))):
        raise AgentGymError(
            f"folder: {name!r} is not a valid name for a Python package and a class; use lowercase letters, digits "
            "and _, start with a letter, and avoid Python's keywords, as in my_env"
        )
    # The folder would shadow that package wherever Python is started next to it.
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise AgentGymError(f"folder: a Python package {name} already exists; choose another name, such as my_{name}")


def names_in(texts: Mapping[str, str]) -> set[str]:
    """Return the names that the code in a template's files uses."""
    trees = [ast.parse(text) for file, text in texts.items() if file.endswith(".py")]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def templates() -> Path:
    """Return the folder of the templates, in the wheel or in a checkout."""
    room = Path(__file__).parents[2]
    for place in (room / "_templates", room.parent / "templates"):
        if place.is_dir():
            return place
    raise AgentGymError(f"the templates are missing from this installation ({room / '_templates'}); reinstall agentgym")


def target(file: str, kind: str, name: str) -> str:
    """Return the name that a template's file gets in the new folder."""
    return file.replace(f"test_{kind}.", f"test_{name}.")


def renamed(text: str, kind: str, name: str) -> str:
    """Return a template's text with `tool_template` and `ToolTemplate` replaced by the new environment's names."""
    title, cls = kind.title(), class_name(name)
    names = {f"{kind}_template": name, f"{title}Template": cls, f"{title}Task": f"{cls}Task"}
    return re.sub("|".join(names), lambda found: names[found[0]], text)  # in one pass, for a name such as game_task


def class_name(name: str) -> str:
    """Return the class name of an environment: `my_shop` becomes `MyShop`."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))

"""The command `agentgym new`: creates the folder of a new environment, with a README and a test."""

import importlib.util
import keyword
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
    "sandbox": ("--model", "Qwen/Qwen3-0.6B", "--engine.dtype", "bfloat16"),
    "chat": ("--model", "Qwen/Qwen3-0.6B", "--engine.dtype", "bfloat16"),
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
    name = folder.name
    if folder.exists():
        raise AgentGymError(f"folder: {folder} already exists; choose another name, or remove it first")
    refuse_name(name)
    if (file := folder.with_name(f"{name}.py")).exists():
        raise AgentGymError(
            f"folder: {folder} would hide the file {file}: Python would import the folder instead; choose another name"
        )
    if not folder.parent.is_dir():
        raise AgentGymError(f"folder: there is no folder {folder.parent}; create it first")
    template = templates() / kind
    for path in sorted(template.iterdir()):
        if path.suffix in SUFFIXES:
            _write(folder / target(path.name, kind, name), renamed(path.read_text(), kind, name))
    test, of = shlex.join(["pytest", str(folder)]), str(folder) if len(folder.parts) > 1 else name
    say(f"next: {test}; then {command('check', of)}, {command('play', of)} and {command('train', of, *TRAINED[kind])}")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a file of the new folder, and remove the folder if that fails."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise AgentGymError(
            f"folder: {path} cannot be written ({error.strerror}); change to a writable folder"
        ) from error
    say(f"wrote {path}")


def refuse_name(name: str) -> None:
    """Raise AgentGymError if the name isn't valid for a Python package, or another package has it."""
    if not (name.isidentifier() and name.isascii() and name == name.lower()) or keyword.iskeyword(name):
        raise AgentGymError(
            f"folder: {name!r} is not a valid Python package name; use lowercase letters, digits and _, as in my_env"
        )
    # The folder would shadow that package wherever Python is started next to it.
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise AgentGymError(f"folder: a Python package {name} already exists; choose another name, such as my_{name}")


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
    for old, now in {f"{kind}_template": name, f"{title}Template": cls, f"{title}Task": f"{cls}Task"}.items():
        text = text.replace(old, now)
    return text


def class_name(name: str) -> str:
    """Return the class name of an environment: `my_shop` becomes `MyShop`."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))

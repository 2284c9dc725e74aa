"""The command `agentgym new`: the folder of a new environment, with its README and its test."""

import importlib.util
import keyword
import shlex
import shutil
import sys
from pathlib import Path
from typing import Literal

import tyro

from agentgym.cli.output import say
from agentgym.errors import AgentGymError
from agentgym.files.names import command

Kind = Literal["tool", "sandbox", "chat", "game"]
SUFFIXES = (".py", ".md")
"""What a template holds; whatever else lies in its folder was left by a program that ran there."""


def new(folder: tyro.conf.Positional[Path], kind: Kind = "tool") -> int:
    """Write the folder of a new environment: env.py, README.md and a test that passes.

    For example:
    $ agentgym new hello
    $ agentgym new mend_code --kind sandbox

    Args:
        folder: The folder to write, whose last part is the environment's name, such as hello or envs/my_shop.
        kind: What it is made from: tool has one tool and one reward, sandbox runs code in a sandbox, chat answers in
        text
            as a user would, and game rewards each turn.
    """
    name = folder.name
    if folder.exists():
        raise AgentGymError(f"folder: {folder} exists already; take another name, or remove it first")
    refuse_name(name)
    if not folder.parent.is_dir():
        raise AgentGymError(f"folder: there is no folder {folder.parent}; make it first")
    template = templates() / kind
    for path in sorted(template.iterdir()):
        if path.suffix in SUFFIXES:
            _write(folder / target(path.name, kind, name), renamed(path.read_text(), kind, name))
    test, of = shlex.join(["pytest", str(folder)]), str(folder) if len(folder.parts) > 1 else name
    say(f"next: {test}; then {command('check', of)}, {command('play', of)} and {command('train', of)}")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a file of the new folder, which is taken away again where that fails."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise AgentGymError(f"folder: {path} cannot be written ({error.strerror}); go to a folder of yours") from error
    say(f"wrote {path}")


def refuse_name(name: str) -> None:
    """Raise AgentGymError where no Python package can have the name, or another one has it."""
    if not (name.isidentifier() and name.isascii() and name == name.lower()) or keyword.iskeyword(name):
        raise AgentGymError(
            f"folder: {name!r} is no name of a Python package; use lower case letters, digits and _, as in my_env"
        )
    # The folder would stand in front of that package wherever Python is started beside it.
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise AgentGymError(f"folder: there is a Python package {name} already; take another name, such as my_{name}")


def templates() -> Path:
    """Return the folder of the templates: of the wheel, or of a checkout."""
    room = Path(__file__).parents[2]
    for place in (room / "_templates", room.parent / "templates"):
        if place.is_dir():
            return place
    raise AgentGymError(f"the templates are not in this installation ({room / '_templates'}); install agentgym again")


def target(file: str, kind: str, name: str) -> str:
    """Return the name of a template's file in the new folder."""
    return file.replace(f"test_{kind}.", f"test_{name}.")


def renamed(text: str, kind: str, name: str) -> str:
    """Return a template's text with the names of the new environment: `tool_template` and `ToolTemplate` are those."""
    title, cls = kind.title(), class_name(name)
    for old, now in {f"{kind}_template": name, f"{title}Template": cls, f"{title}Task": f"{cls}Task"}.items():
        text = text.replace(old, now)
    return text


def class_name(name: str) -> str:
    """Return the name of the class of an environment: `my_shop` is `MyShop`."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))

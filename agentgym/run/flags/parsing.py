"""The reading of a recipe's flags, and what is said of a flag that is refused."""

import inspect
import io
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from agentgym.errors import AgentGymError
from agentgym.extras import needs_extra
from agentgym.run.config import RunConfig
from agentgym.run.flags.refusals import refusal
from agentgym.run.settings import flat
from agentgym.store.schema import StoreError

PACKAGE = Path(__file__).parents[2]
ENGINES = (
    "What samples: `--engine local` is the model in this process, `--engine sglang` SGLang servers, and `--engine "
    "package.module:Class` an engine of your own. Each has settings of its own: put it in front of --help to see them."
)
"""What --help says of the engines whose settings it does not list."""
NAMED = re.compile(r"([\w.]+(?:, [\w.]+)*): ")
"""The fields that a ValueError of a config names, in front of what it says."""
FIELD = re.compile(r"\b[a-z]\w*(?:[._][a-z]\w*)+\b")
"""What may be the name of a field in what a ValueError says, and is no word of English."""


def parsed(
    recipe: type[RunConfig], default: RunConfig, arguments: Sequence[str], *, prog: str | None = None
) -> RunConfig:
    """Read a recipe's settings from its flags; a flag or a value that is refused is one line with the flag's name.

    Ends with exit status 2 where a flag is unknown or refused, and with 0 behind --help.
    """
    import tyro

    said = io.StringIO()
    try:
        with redirect_stderr(said), needs_extra():  # tyro looks for torch
            return tyro.cli(
                recipe,
                prog=prog,
                args=arguments,
                default=default,
                description=_description(recipe),
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as stopped:
        if (refused := _refused(stopped)) is not None:
            said = io.StringIO(f"{recipe.__name__}: {_with_flags(refused, default, arguments)}\n")
        elif stopped.code:
            said = io.StringIO(f"{recipe.__name__}: {refusal(said.getvalue(), arguments)}; --help lists all options\n")
        raise
    finally:
        sys.stderr.write(said.getvalue())


def _description(recipe: type[RunConfig]) -> str:
    """Return what --help says first: the recipe's own docstring, where it has one, and how an engine is chosen."""
    own = inspect.cleandoc(recipe.__doc__ or "")
    made = own.startswith(f"{recipe.__name__}(")  # by dataclass, of the fields
    return ENGINES if made or not own else f"{own}\n\n{ENGINES}"


def _refused(stopped: SystemExit) -> ValueError | None:
    """Return the error of our config for which tyro ended the program; None where it ended for something else."""
    error = stopped.__context__
    while error is not None:
        if isinstance(error, ValueError) and is_told(error):
            return error
        error = error.__context__
    return None


def is_told(error: Exception) -> bool:
    """Whether the message alone says what to do: an error of agentgym's, or a refusal of its that names a field."""
    if isinstance(error, AgentGymError | StoreError):
        return True
    last = [frame.f_code.co_filename for frame in _frames(error)][-1:]
    ours = any(Path(file).is_relative_to(PACKAGE) for file in last)
    return ours and type(error) in (ValueError, TypeError) and NAMED.match(str(error)) is not None


def _with_flags(error: ValueError, default: RunConfig, arguments: Sequence[str]) -> str:
    """Return the message of a config's error, with flags in the place of the fields that it names.

    Of two parts of one type, such as engine and teacher_engine, it is the one that the command line sets.
    """
    message = str(error)
    named = NAMED.match(message)
    if named is None:
        return message
    parts: dict[type, str] = {type(default): ""}
    nested = ((field.name, getattr(default, field.name)) for field in fields(default))
    for name, value in nested:
        flag = f"--{name}.".replace("_", "-")
        if is_dataclass(value) and (type(value) not in parts or any(word.startswith(flag) for word in arguments)):
            parts[type(value)] = f"{name}."
    makers = (type(frame.f_locals.get("self")) for frame in _frames(error))
    within = [parts[maker] for maker in makers if maker in parts][-1:]
    written = [word.partition("=")[0] for word in arguments]
    flag_of = partial(_flag, within="".join(within), known=flat(default), written=written)
    told = FIELD.sub(lambda found: flag_of(found[0]), message[named.end() :])
    return f"{', '.join(map(flag_of, named[1].split(', ')))}: {told}"


def _flag(name: str, *, within: str, known: Collection[str], written: Sequence[str]) -> str:
    """Return the flag of a field that the part `within` of a run names, or the run itself, as it was written.

    Of a field with parts it is the flags of those that were written.
    """
    field = re.sub(r"(\.\d+)+$", "", name)  # a place in a tuple has no flag of its own
    dotted = f"{within}{field}" if f"{within}{field}" in known else field
    flag = f"--{dotted.replace('_', '-')}"
    if dotted not in known:
        return name
    if below := [word for word in written if word.startswith(f"{flag}.")]:
        return ", ".join(below)
    part, dot, last = flag.removeprefix("--").rpartition(".")
    off = f"--{part}{dot}no-{last}"
    return off if off in written else flag


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Give the frames that an error passed, the one that raised it last."""
    return (frame for frame, _ in walk_tb(error.__traceback__))

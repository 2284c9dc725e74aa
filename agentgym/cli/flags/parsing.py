"""The reading of a recipe's flags, and what is said of a flag that is refused."""

import inspect
import io
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from agentgym.cli.output import RefusedWords
from agentgym.errors import AgentGymError
from agentgym.errors.extras import needs_extra
from agentgym.run.config import RunConfig
from agentgym.store.run_settings import flat
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
_TITLE_OR_END = re.compile(r"[╭╰]| \S")
_FLAG = re.compile(r"--?[a-zA-Z]")
_RULE = re.compile(r"[─-]+")
_UNKNOWN = re.compile(r"Unrecognized options: ?(.*)")
_MEANT = re.compile(r"Perhaps you meant: (-[\w.-]+)")
_TYPE = re.compile(r" into \w+ type typing\..*")
_NEEDED = re.compile(r"Missing from .*?: (\S+) (.*?)(?: \(required\))?$")


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


def flags_in(words: Sequence[str], prefix: str, command: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return name and value of each flag with the prefix, `--PREFIX.NAME VALUE` or with `=`, and the other words.

    :raises RefusedWords: for a flag without a value; the message names it.
    """
    found: list[tuple[str, str]] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if not flag.startswith(prefix):
            others.append(word)
            continue
        value = text if equals else next(rest, "--")
        if not equals and value.startswith("--"):
            raise RefusedWords(f"{command}: {flag}: needs a value after it")
        found.append((flag.removeprefix(prefix), value))
    return found, others


def refusal(said: str, arguments: Sequence[str] = ()) -> str:
    """Return what tyro's framed text says in one line: the word that is wrong, and the option that may be meant.

    A word that is one too many among the `arguments` is named with the option in front of it.
    """
    parts = [" ".join(part) for part in _sections(said)]
    text = parts[0] if parts else " ".join(said.split())
    if (unknown := _UNKNOWN.match(text)) is not None:
        return _of_unknown(unknown[1].split(", "), " ".join(parts[1:]), arguments)
    if (needed := _NEEDED.match(text)) is not None:
        return f"{needed[1]} is missing: {_plain(needed[2])}"
    return _plain(text.partition(" Got errors:")[0])


def _sections(said: str) -> list[list[str]]:
    """Return the lines below the title, cut where a line is drawn across; there are no sides where stdout is ASCII."""
    found: list[list[str]] = [[]]
    for line in said.splitlines():
        words = line.strip("│ ")
        if _TITLE_OR_END.match(line) or not words:
            continue
        if _RULE.fullmatch(words):
            found.append([])
        else:
            found[-1].append(words)
    return [part for part in found if part]


def _of_unknown(words: list[str], hint: str, arguments: Sequence[str]) -> str:
    flag = next((word for word in words if _FLAG.match(word)), None)
    if flag is None:
        given = [part.strip() for word in arguments for part in word.split("=", 1)]
        behind = [f" after {one}" for one, word in pairwise(given) if word == words[0] and _FLAG.match(one)]
        return f"{words[0]!r}{''.join(behind[:1])} is one word too many"
    meant = _MEANT.search(hint)
    return f"there is no option {flag}" + (f"; did you mean {meant[1]}?" if meant else "")


def _plain(text: str) -> str:
    """Return a sentence as a part of another one."""
    return _TYPE.sub("", text[:1].lower() + text[1:]).removesuffix(".")

"""The command `agentgym`: its subcommands, and the parsing of its command line.

A command's dependencies are imported when it runs: help needs neither torch nor Docker's client.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_type_hints

import tyro

from agentgym.cli.doctor import doctor, installed
from agentgym.cli.envs.check import check
from agentgym.cli.envs.names import PREFIX, parameters_in
from agentgym.cli.envs.new import new
from agentgym.cli.envs.play import play
from agentgym.cli.envs.serve import serve
from agentgym.cli.envs.train import train, train_by_flags
from agentgym.cli.evals.eval import compare_runs, evaluate_env
from agentgym.cli.evals.models import PREFIX as MODELS, models_in
from agentgym.cli.evals.rescore import rescore_run
from agentgym.cli.exports import export_run, import_atif
from agentgym.cli.flags import commanded, open_flags
from agentgym.cli.gc import gc
from agentgym.cli.ls import ls
from agentgym.cli.merge import merge
from agentgym.cli.output import RefusedWords, flush, forget_stdout, say
from agentgym.cli.report import report
from agentgym.cli.sandbox import build
from agentgym.cli.show import show
from agentgym.cli.view import view
from agentgym.config_fields import nearest
from agentgym.errors import AgentGymError
from agentgym.errors.extras import DISTRIBUTION, needs_extra
from agentgym.files.disk import disk_trouble
from agentgym.files.names import refused_path
from agentgym.types.transcript import printable

HEADER = """From an idea to a trained model: manage environments, runs, and what is installed on this machine.

For example:
$ agentgym new hello
$ agentgym check hello
$ agentgym play hello
$ agentgym train hello
$ agentgym show runs/chase_grpo/20260801-101500 --worst 3
$ agentgym doctor

Run a command with --help for details and examples, as in `agentgym show --help`.
"""
BROKEN_PIPE = 141
"""Exit code if the reader of stdout has stopped reading, the same as that of a program ended by SIGPIPE."""
LONGEST = 8000
"""Maximum characters of an error message."""
ASKING = ("agentgym eval", "agentgym rescore")
"""The commands that accept model roles."""
PLAYING = ("agentgym check", "agentgym eval", "agentgym play", "agentgym serve")
"""The commands that accept an env's parameters."""

COMMANDS: Mapping[str, Any] = {
    "check": check,
    "compare": compare_runs,
    "doctor": doctor,
    "eval": evaluate_env,
    "export": export_run,
    "gc": gc,
    "import": import_atif,
    "ls": ls,
    "merge": merge,
    "new": new,
    "play": play,
    "report": report,
    "rescore": rescore_run,
    "sandbox": {"build": build},
    "serve": serve,
    "show": show,
    "train": train,
    "view": view,
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    An agentgym error, a missing package, a path that can't be used, or a full or broken disk is reported as one line
    on stderr.
    """
    args = sys.argv[1:] if args is None else list(args)
    try:
        with needs_extra():
            code = _read(args)()
        flush()
        return code
    except BrokenPipeError:
        forget_stdout()
        return BROKEN_PIPE
    except RefusedWords as error:
        sys.stderr.write(f"agentgym: {_sentence(error)}\n")
        return 2
    except AgentGymError as error:
        sys.stderr.write(f"agentgym: {_sentence(error)}\n")
        return 1
    except OSError as error:
        if (said := refused_path(error, args[1:])) is None and disk_trouble(error) is None:
            raise
        said = said or f"{error}; free space on its disk, or use another one"
        sys.stderr.write(f"agentgym: {args[0]}: {_sentence(said)}\n")
        return 1


def _sentence(error: Exception | str) -> str:
    """Return an error's message, cut if a name or a value from a file makes it too long."""
    said = printable(str(error))
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1000]} ... {said[-1000:]}"


def _read(args: Sequence[str]) -> Callable[[], int]:
    """Return the command that the words request, ready to run.

    Raises:
        RefusedWords: If a word is wrong; the message says why.
    """
    if args[:1] in (["--version"], ["-V"]):
        return _say_version
    path = _path(args, COMMANDS)
    if path == "agentgym train":
        return partial(train_by_flags, args[1:])
    prefixes = (*((MODELS,) if path in ASKING else ()), *((PREFIX,) if path in PLAYING else ()))
    command = path.removeprefix("agentgym").strip()
    try:
        made, rest = commanded(
            _parser(COMMANDS, brief=path == "agentgym"),
            args,
            prog="agentgym",
            description=HEADER,
            config=(tyro.conf.DisallowNone,),
        )
        given = open_flags(rest, prefixes, known=_flags(path))
    except RefusedWords as refused:
        wrong = ": ".join(filter(None, [command, str(refused)]))
        raise RefusedWords(f"{wrong}; see `{path} --help`") from None
    named: dict[str, Any] = {"models": models_in(given, command)} if MODELS in prefixes else {}
    named |= {"parameters": parameters_in(given)} if PREFIX in prefixes else {}
    return partial(made, **named)


def _say_version() -> int:
    say(f"agentgym {installed(DISTRIBUTION) or 'from a checkout that is not installed'}")
    return 0


def _flags(path: str) -> list[str]:
    """Return the flags of a command, except those whose names depend on the env."""
    found: Any = COMMANDS
    for word in path.split()[1:]:
        found = found[word]
    kinds = {} if isinstance(found, Mapping) else get_type_hints(found, include_extras=True)
    marks = {name: getattr(kind, "__metadata__", ()) for name, kind in kinds.items() if name != "return"}
    flags = [name for name, of in marks.items() if tyro.conf.Positional not in of and tyro.conf.Fixed not in of]
    pairs = [f"no-{name}" for name, kind in kinds.items() if kind is bool]
    return [f"--{name.replace('_', '-')}" for name in (*flags, *pairs)]


def _path(args: Sequence[str], commands: Mapping[str, Any], path: str = "agentgym") -> str:
    """Return the words that name the command.

    Args:
        args: The words that follow `path` on the command line.
        commands: The commands that may come next, by name.
        path: The program's name and the words of the command that were already read.

    Raises:
        RefusedWords: If there is no such command.
    """
    name = args[0] if args else ""
    if name in ("-h", "--help"):
        return path
    if name.startswith("-"):
        raise RefusedWords(f"there is no option {name}; see `{path} --help`")
    if name not in commands:
        wrong = f"there is no command {name!r}; {nearest(name, commands)}"
        raise RefusedWords(wrong if name else f"choose a command: {', '.join(commands)}; see `{path} --help`")
    given = commands[name]
    return _path(args[1:], given, f"{path} {name}") if isinstance(given, Mapping) else f"{path} {name}"


def _parser(commands: Mapping[str, Any], *, brief: bool) -> Any:
    """Return a union of subcommands for tyro; a nested mapping is a command that has subcommands.

    If `brief`, each has only the first sentence of its help, so that the list of all commands fits on a screen.
    """
    made = [_subcommand(name, given, brief=brief) for name, given in commands.items()]
    # A union needs two members, even if there is only one command.
    return Union[(*made, Annotated[None, tyro.conf.Suppress])]


def _subcommand(name: str, given: Any, *, brief: bool) -> Any:
    if not isinstance(given, Mapping):
        words = _first_words(given) if brief else None
        return Annotated[Any, tyro.conf.subcommand(name=name, constructor=_unrun(given), description=words)]
    words = " ".join(f"`{name} {one}`: {_first_words(of)}" for one, of in given.items())
    return Annotated[Any, tyro.conf.subcommand(name=name, constructor=_parser(given, brief=brief), description=words)]


def _first_words(command: Any) -> str:
    return (inspect.getdoc(command) or "").split("\n\n")[0]


def _unrun(command: Callable[..., int]) -> Callable[..., Any]:
    """Return a function for tyro with the command's options, which returns a function that runs the command later."""

    def read(*values: Any, **named: Any) -> Callable[[], int]:
        return partial(command, *values, **named)

    update_wrapper(read, command)
    kinds = get_type_hints(command, include_extras=True)
    read.__annotations__ = {
        name: Annotated[kind, tyro.conf.arg(help_behavior_hint=_hint, metavar=_metavar(name, kind))]
        for name, kind in kinds.items()
    }
    given = inspect.signature(command)
    of = [one.replace(annotation=read.__annotations__[name]) for name, one in given.parameters.items()]
    read.__signature__ = given.replace(parameters=of)  # type: ignore[attr-defined]
    del read.__wrapped__  # type: ignore[attr-defined]
    return read


def _metavar(name: str, kind: Any) -> str | None:
    """Return the word for an argument's value in the help: its name if it has no flag, or None for tyro's word."""
    one = get_args(kind)[:1] in ((str,), (Path,))
    return name.upper() if one and tyro.conf.Positional in getattr(kind, "__metadata__", ()) else None


def _hint(default: str) -> str:
    return "" if default in ("", "None") else f"(default: {default})"

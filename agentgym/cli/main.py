"""The command `agentgym`: its subcommands, and how its words are read.

What a command needs is imported when it runs: asking for help loads neither torch nor Docker's client.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Annotated, Any, Union, get_type_hints

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
from agentgym.cli.output import RefusedWords, forget_stdout, say
from agentgym.cli.report import report
from agentgym.cli.sandbox import build
from agentgym.cli.show import show
from agentgym.cli.view import view
from agentgym.config_fields import nearest
from agentgym.errors import AgentGymError
from agentgym.errors.extras import DISTRIBUTION, needs_extra
from agentgym.types.transcript import printable

HEADER = """From an idea to a trained model: look after environments, runs, and what is installed on this machine.

For example:
$ agentgym new hello
$ agentgym check hello
$ agentgym play hello
$ agentgym train hello
$ agentgym show runs/chase_grpo/20260801-101500 --worst 3
$ agentgym doctor

Each command says more, with examples, in its --help, such as `agentgym show --help`.
"""
BROKEN_PIPE = 141
"""The exit code where whoever reads stdout stops reading, as of a program that SIGPIPE ends."""
LONGEST = 8000
"""The most characters that are printed of an error."""
ASKING = ("agentgym eval", "agentgym rescore")
"""The commands that take model roles."""
PLAYING = ("agentgym check", "agentgym eval", "agentgym play", "agentgym serve")
"""The commands that take the parameters of an env."""

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

    Errors of ours, and a package that is not installed, are one line on stderr.
    """
    args = sys.argv[1:] if args is None else list(args)
    if args[:1] in (["--version"], ["-V"]):
        say(f"agentgym {installed(DISTRIBUTION) or 'of a checkout that is not installed'}")
        return 0
    try:
        with needs_extra():
            code = _read(args)()
        sys.stdout.flush()
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


def _sentence(error: AgentGymError) -> str:
    """Return what an error says, cut where a name or a value of a file makes it endless."""
    said = printable(str(error))
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1000]} ... {said[-1000:]}"


def _read(args: Sequence[str]) -> Callable[[], int]:
    """Return the command that the words ask for, ready to run; RefusedWords says what is wrong with them."""
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
        raise RefusedWords(f"{wrong}; `{path} --help` says more") from None
    named: dict[str, Any] = {"models": models_in(given, command)} if MODELS in prefixes else {}
    named |= {"parameters": parameters_in(given)} if PREFIX in prefixes else {}
    return partial(made, **named)


def _flags(path: str) -> list[str]:
    """Return the flags of a command."""
    found: Any = COMMANDS
    for word in path.split()[1:]:
        found = found[word]
    names = [] if isinstance(found, Mapping) else inspect.signature(found).parameters
    return [f"--{name.replace('_', '-')}" for name in names]


def _path(args: Sequence[str], commands: Mapping[str, Any], path: str = "agentgym") -> str:
    """Return the words that name the command; RefusedWords where there is no such command."""
    name = args[0] if args else ""
    if name in ("-h", "--help"):
        return path
    if name.startswith("-"):
        raise RefusedWords(f"there is no option {name}; `{path} --help` says more")
    if name not in commands:
        wrong = f"there is no command {name!r}; {nearest(name, commands)}"
        raise RefusedWords(wrong if name else f"name a command: {', '.join(commands)}; `{path} --help` says more")
    given = commands[name]
    return _path(args[1:], given, f"{path} {name}") if isinstance(given, Mapping) else f"{path} {name}"


def _parser(commands: Mapping[str, Any], *, brief: bool) -> Any:
    """Make a union of subcommands, as tyro takes it; a nested mapping is a command with commands of its own.

    A brief one has the first sentence of each, so that a list of all fits a screen.
    """
    made = [_subcommand(name, given, brief=brief) for name, given in commands.items()]
    # A union needs two members, also where there is one command.
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
    """Return a function with the command's options that runs nothing: what the command writes is not tyro's."""

    def read(*values: Any, **named: Any) -> Callable[[], int]:
        return partial(command, *values, **named)

    update_wrapper(read, command)
    hinted = tyro.conf.arg(help_behavior_hint=_hint)
    kinds = get_type_hints(command, include_extras=True)
    read.__annotations__ = {name: Annotated[kind, hinted] for name, kind in kinds.items()}
    given = inspect.signature(command)
    of = [one.replace(annotation=read.__annotations__[name]) for name, one in given.parameters.items()]
    read.__signature__ = given.replace(parameters=of)  # type: ignore[attr-defined]
    del read.__wrapped__  # type: ignore[attr-defined]
    return read


def _hint(default: str) -> str:
    return "" if default in ("", "None") else f"(default: {default})"

"""The command line of every recipe: settings in, progress on stderr, one line of JSON on stdout."""

import argparse
import asyncio
import copy
import inspect
import json
import os
import shlex
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

from agentgym.cli.flags.parameter_help import with_parameters
from agentgym.cli.flags.parsing import is_told, parsed
from agentgym.engines.custom import OtherEngine
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.transformers.engine import LocalConfig
from agentgym.errors import AgentGymError, EnvError
from agentgym.errors.extras import needs_extra
from agentgym.files.disk import disk_trouble
from agentgym.files.held import place_now
from agentgym.files.names import drop_unused, whole_path
from agentgym.launch.train import train_policy
from agentgym.run.config import RunConfig
from agentgym.run.loop import is_first, new_folder
from agentgym.run.metrics_logger import strict
from agentgym.run.resume import CHECKPOINTS, NotSaved
from agentgym.run.summary import look_lines
from agentgym.run.tasks.envs import member_name, read_env_arguments
from agentgym.scheduling.garbage import import_for_good
from agentgym.store.run_settings import SETTINGS, begun_steps
from agentgym.train.checkpoint import last_step
from agentgym.types.transcript import printable

T = TypeVar("T")

ENGINES = ("engine", "teacher_engine")
"""The settings that a flag of theirs gives as a name, such as sglang."""
HELP = {"-h", "--help"}
"""The flags that print every setting."""
SHOW_CURSOR = "\x1b[?25h"
"""What a terminal is told to show the cursor, which the progress bar hides while it is shown."""
STOPPING = (
    "{name} came: stopping; the training step or the sync that is under way is waited for, boxes and engine are "
    "closed, and the last finished step is written. Ctrl-C now ends at once, with the checkpoints that are on disk"
)
"""What the first signal makes a run say, before seconds in which nothing seems to happen."""


def main(recipe: type[RunConfig]) -> None:
    """Run a recipe from the command line; a stop at any moment keeps the last finished step and says how to go on.

    The last line on stdout is the summary as JSON. Ctrl-C ends with exit status 130 and SIGTERM with 143, after one
    line on stderr that names the run's folder and the command that resumes it; a second Ctrl-C ends at once.
    `--engine sglang` samples through SGLang servers, `--engine module:Class` through an engine of the user's own; the
    flags under `--engine.` are then its. `--teacher-engine` does the same for a teacher. A flag that means nothing ends
    with exit status 2 and the flag's name on stderr. A setting that does not fit the env, the model or the
    folder, an error of agentgym's own, a full disk and a missing package are one line on stderr, with exit status 1.
    """
    refuse_ignored(recipe)
    summary = run_recipe(recipe, sys.argv[1:])
    for line in look_lines(Path(summary["out"])) if is_first() else ():
        sys.stderr.write(f"{line}\n")


def run_recipe(recipe: type[RunConfig], arguments: Sequence[str], *, prog: str | None = None) -> dict[str, Any]:
    """Run a recipe with these words of its command line, as `main` does, and return the summary.

    `prog` is what --help calls the program.
    """
    stop = Stop()
    try:
        with stop:
            summary = _run(recipe, arguments, stop, prog)
    except NotSaved as error:
        again = resume_command(error.folder, sys.argv[1:])
        raise SystemExit(printable(f"{recipe.__name__}: {error}; to go on: {again}")) from None
    except (AgentGymError, ValueError, TypeError) as error:
        if not is_told(error):
            raise
        raise SystemExit(printable(f"{recipe.__name__}: {error}")) from None
    except OSError as error:
        if disk_trouble(error) is None:
            raise
        raise SystemExit(printable(f"{recipe.__name__}: {error}; make room on its disk. {stop.kept()}")) from None
    with _stdout_read():
        if is_first():
            print(json.dumps(strict(summary), allow_nan=False))  # noqa: T201  the recipe's result
    return summary


@contextmanager
def _stdout_read() -> Iterator[None]:
    """End with exit status 141, as SIGPIPE does, where whoever read stdout has gone."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes nowhere
        raise SystemExit(128 + signal.SIGPIPE) from None


def _run(recipe: type[RunConfig], arguments: Sequence[str], stop: "Stop", prog: str | None) -> dict[str, Any]:
    """Run the recipe with the settings of the command line; a signal ends it with SystemExit."""
    with _stdout_read():  # --help writes there
        run = settings(recipe, arguments, prog=prog)
    made = new_folder(run.recipe) if run.resume is None and run.out is None and is_first() else None
    run = run if made is None else replace(run, out=made)
    named = run.resume or run.out
    stop.folder = named and whole_path(named)
    try:
        with needs_extra():
            import_for_good("agentgym.train.trainer")  # seconds, in which a stop needs no clearing up
        return asyncio.run(stop.cancels(train_policy(run)))
    except (asyncio.CancelledError, Exception):  # processes that a stop tore apart fail each in its way
        if stop.number is None:
            raise
        stop.say()
        raise SystemExit(128 + stop.number) from None
    finally:
        if made is not None:
            drop_unused(made)


def refuse_ignored(recipe: type[RunConfig]) -> None:
    """End with a message where a setting that the recipe's class spells out would be ignored."""
    if not isinstance(recipe, type):
        raise SystemExit(f"ag.main: pass the class, `ag.main({type(recipe).__name__})`, not an instance of it")
    if not issubclass(recipe, RunConfig):
        raise SystemExit(f"ag.main: {recipe.__name__} is no subclass of ag.RunConfig")
    names = {field.name for field in fields(recipe)}
    for owner in recipe.__mro__:
        noted = inspect.get_annotations(owner)
        bare = sorted(names & vars(owner).keys() - noted.keys())
        decorated = "__dataclass_fields__" in vars(owner)
        if issubclass(owner, RunConfig) and not decorated and (noted or bare):
            raise SystemExit(
                f"{owner.__name__}: its settings ({', '.join([*noted, *bare])}) would be ignored; decorate it with "
                "@dataclass(frozen=True, kw_only=True), and annotate each setting, as in `steps: int = 1`"
            )
        if bare:
            raise SystemExit(
                f"{owner.__name__}.{bare[0]}: it would be ignored without a type; annotate it, as in `steps: int = 1`"
            )


def settings(recipe: type[RunConfig], arguments: Sequence[str], *, prog: str | None = None) -> RunConfig:
    """Read the recipe's settings from the command line; the engines come first: they decide which flags exist.

    `--env.NAME VALUE` sets a parameter of the env, beside those that the recipe sets; `--env.MEMBER.NAME VALUE` one of
    a mixture, and `--env.MEMBER VALUE` a member's weight. A run that is resumed without `--steps` has those that it was
    begun with.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for engine in ENGINES:
        first.add_argument(f"--{engine.replace('_', '-')}", type=_engine)
    chosen, rest = first.parse_known_args(arguments)
    try:
        default = recipe()  # type: ignore[call-arg]  # a recipe spells all its values out
    except TypeError as error:
        raise SystemExit(f"{recipe.__name__}: every field of a recipe needs a value of its own: {error}") from None
    default = _with_engines(default, {name: engine for name, engine in vars(chosen).items() if engine is not None})
    texts, others = _env_arguments(default, rest)
    if HELP.intersection(others):
        default = _with_parameters(default, others)
    _refuse_missing_folders(recipe, others)
    run = parsed(type(default), default, others, prog=prog)
    if run.resume is not None and not any(word.partition("=")[0] == "--steps" for word in others):
        run = replace(run, steps=begun_steps(run.resume, run.steps))
    return _with_env_arguments(run, texts) if texts else run


def _with_engines(default: RunConfig, engines: Mapping[str, Any]) -> RunConfig:
    """Return the run with these engines, unchecked: the flags that belong to them are still to be read."""
    made = copy.copy(default)
    for name, engine in engines.items():
        object.__setattr__(made, name, engine)
    return made


def _refuse_missing_folders(recipe: type[RunConfig], arguments: Sequence[str]) -> None:
    """End with exit status 2 where a model is given as a path at which there is nothing: a hub has no such names."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, given in pairwise(words):
        if flag in ("--model", "--teacher") and given.startswith((".", "/", "~")) and not Path(given).exists():
            _refuse_flag(recipe, f"{flag}: there is no folder {given}; give one that exists")


def _with_parameters(default: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """Return the run with flags of its env's parameters; as it is, after a line on stderr, where it has no such env."""
    try:
        with needs_extra():
            return with_parameters(default, arguments)
    except (ValueError, EnvError) as error:
        sys.stderr.write(f"{type(default).__name__}: the env's parameters cannot be listed: {error}\n")
        return default


def _env_arguments(default: RunConfig, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values behind --env.NAME by name, and the other arguments, the weights of a mixture among them."""
    weights = {} if isinstance(default.env, str) else {member_name(name): name for name in default.env}
    texts: dict[str, str] = {}
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, text = word.partition("=")
        named = flag.removeprefix("--env.")
        if not flag.startswith("--env.") or named in weights.values():
            others.append(word)
            continue
        if named in weights:
            others.append(f"--env.{weights[named]}{equals}{text}")
            continue
        value = text if equals else next(words, None)
        if value is None:
            _refuse_flag(type(default), f"{flag}: needs a value after it")
        member, dot, name = flag.removeprefix("--env.").rpartition(".")
        texts[f"{member}{dot}{name.replace('-', '_')}"] = value
    return texts, others


def _with_env_arguments(run: RunConfig, texts: Mapping[str, str]) -> RunConfig:
    """Return the run with these values of its env's parameters; exit status 2 where the env refuses one."""
    try:
        values = read_env_arguments(run.env, texts)
    except ValueError as error:
        _refuse_flag(type(run), f"--env.{error}")
    return replace(run, env_args={**run.env_args, **values})


def _refuse_flag(recipe: type[RunConfig], message: str) -> NoReturn:
    """End with exit status 2 and one line on stderr."""
    sys.stderr.write(f"{recipe.__name__}: {message}\n")
    raise SystemExit(2) from None


def _engine(name: str) -> LocalConfig | SGLangConfig | OtherEngine:
    """Return the settings of the engine of that name, before its flags are read."""
    if name in ("local", "sglang"):
        return LocalConfig() if name == "local" else SGLangConfig()
    if ":" not in name:
        raise argparse.ArgumentTypeError(f"{name!r} is none of local, sglang, package.module:Class")
    return OtherEngine(name=name)


class Stop:
    """Turns the first SIGINT or SIGTERM into a cancellation of the run; open from before its start to its end.

    Before the run has begun, or has met the other processes that torchrun starts, there is nothing to give back, and
    the process ends there and then: one that was refused or killed never comes. A second Ctrl-C ends
    it in any case; a SIGTERM behind the first signal, as torchrun sends it, changes nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The number of the signal that came first; None before one came."""
        self.folder: Path | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job is not to hear Ctrl-C
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def cancels(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work; a signal cancels it."""
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        return await work

    def say(self) -> None:
        """Write one line on stderr: where the run is, and the command that resumes it."""
        if not is_first():
            return
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        # Not by print: a handler may run in the middle of another write.
        os.write(2, f"{cursor}\nStopped by {_name(self.number)}: {self.kept()}\n".encode())

    def kept(self) -> str:
        """Say how much of the run is on disk, and which command goes on with it."""
        folder = self.folder and place_now(self.folder)
        if folder is None or not (folder / SETTINGS).exists():
            return f"nothing was begun; to run it: {_command(sys.argv[1:])}"
        done = last_step(folder / CHECKPOINTS)
        kept = f"{done} finished steps are kept" if done else "no step was finished"
        return f"{kept} in {folder}; to go on: {resume_command(folder, sys.argv[1:])}"

    def _came(self, number: int, frame: FrameType | None) -> None:
        again = self.number is not None
        self.number = self.number or number
        if again and number == signal.SIGTERM:
            return
        if again or self._running is None or _waits_for_others():
            self.say()
            os._exit(128 + self.number)
        if is_first():
            os.write(2, f"\n{STOPPING.format(name=_name(number))}\n".encode())
        loop, task = self._running
        if not loop.is_closed():  # else the run has come to its end
            loop.call_soon_threadsafe(task.cancel)


def _waits_for_others() -> bool:
    """Whether this process runs with others that have not all come yet."""
    from agentgym.train.distributed import all_came  # it loads torch, which a run that has begun has done

    return not all_came()


def _name(number: int | None) -> str:
    return "Ctrl-C" if number == signal.SIGINT else "SIGTERM"


def resume_command(folder: Path, arguments: Sequence[str]) -> str:
    """Give the command line that resumes the run in `folder`: this one, with --resume in place of its folder."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--out", "--resume"):
            next(words, None)
        elif not word.startswith(("--out=", "--resume=")):
            kept.append(word)
    return _command([*kept, "--resume", str(folder)])


def _command(arguments: Sequence[str]) -> str:
    """Give the command line that started this program, with these arguments instead."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec is not None else ""
    program = ["-m", name] if name else [sys.argv[0]]
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    start = ["torchrun", "--nproc-per-node", ranks] if ranks else [sys.executable]
    return shlex.join([*start, *program, *arguments])

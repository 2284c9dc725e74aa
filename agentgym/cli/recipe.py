"""The command line of every recipe: settings in, progress on stderr, one line of JSON on stdout."""

import asyncio
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from agentgym.cli.flags import is_told, read_words, settings_of, without_flags
from agentgym.cli.output import RefusedWords, stdout_read
from agentgym.engines.transformers.engine import TransformersConfig
from agentgym.errors import AgentGymError
from agentgym.errors.extras import needs_extra
from agentgym.files.disk import disk_trouble
from agentgym.files.held import place_now
from agentgym.files.names import command, drop_unused, shown, whole_path
from agentgym.launch.train import train_policy
from agentgym.run.callbacks import Callback
from agentgym.run.config import RunConfig
from agentgym.run.loop import is_first, new_folder
from agentgym.run.metrics_logger import METRICS, strict
from agentgym.run.resume import CHECKPOINTS, NotSaved
from agentgym.run.summary import under
from agentgym.run.tasks.envs import parameter_in
from agentgym.scheduling.garbage import import_for_good
from agentgym.store.run_settings import SETTINGS
from agentgym.train.checkpoint import last_step
from agentgym.types.transcript import printable

T = TypeVar("T")

SHOW_CURSOR = "\x1b[?25h"
"""What a terminal is told to show the cursor, which the progress bar hides while it is shown."""
STOPPING = (
    "{name} came: stopping; the training step or the sync that is under way is waited for, sandboxes and engine are "
    "closed, and the last finished step is written. Ctrl-C now ends at once, with the checkpoints that are on disk"
)
"""What the first signal makes a run say, before seconds in which nothing seems to happen."""


def main(recipe: RunConfig, *, callbacks: Iterable[Callback] = ()) -> None:
    """Run a recipe from the command line; a stop at any moment keeps the last finished step and says how to go on.

    Flags override the recipe's settings: `--max-steps 40 --train.lr 1e-3`. The last line on stdout is the summary as
    JSON. Ctrl-C ends with exit status 130 and SIGTERM with 143, after one line on stderr that names the run's folder
    and the command that resumes it; a second Ctrl-C ends at once. `--engine sglang` samples through SGLang servers,
    `--engine module:Class` through an engine of the user's own; the flags under `--engine.` are then its.
    `--teacher-engine` does the same for a teacher. A flag that means nothing ends with exit status 2 and the flag's
    name on stderr. A setting that does not fit the env, the model or the folder, an error of agentgym's own, a full
    disk and a missing package are one line on stderr, with exit status 1. `--help` begins with the docstring of the
    program. `callbacks` hear the events of the run.
    """
    if not isinstance(recipe, RunConfig):
        got = f"the class {recipe.__name__}" if isinstance(recipe, type) else repr(recipe)
        raise SystemExit(f"ag.main: give it a config, as in `ag.main(ag.RunConfig(env=..., model=...))`, not {got}")
    if threading.current_thread() is not threading.main_thread() or _in_loop():
        raise RuntimeError("ag.main: is for a program's main thread; elsewhere, `await ag.train_policy(run)` trains")
    with program(recipe.name) as stop:
        run = settings(recipe, sys.argv[1:], about=sys.modules["__main__"].__doc__ or "")
        summary = finished(run, stop, callbacks)
    say_what_is_next(Path(summary["output_dir"]), run)


def _in_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def settings(recipe: RunConfig, words: Sequence[str], *, about: str = "") -> RunConfig:
    """Return the recipe with what the command line sets; RefusedWords names a flag that is refused."""
    return settings_of(recipe, read_words(recipe, words), about=about)


@contextmanager
def program(name: str) -> Iterator["Stop"]:
    """Read and run a recipe inside: a signal stops it, and an error that says what to do is one line with the name."""
    stop = Stop()
    try:
        with stop:
            yield stop
    except RefusedWords as error:
        sys.stderr.write(f"{printable(f'{name}: {error}')}; --help lists all options\n")
        raise SystemExit(2) from None
    except NotSaved as error:
        again = resume_command(error.folder, sys.argv[1:])
        raise SystemExit(printable(f"{name}: {error}; to go on: {again}")) from None
    except (AgentGymError, ValueError, TypeError) as error:
        if not is_told(error):
            raise
        raise SystemExit(printable(f"{name}: {error}")) from None
    except OSError as error:
        if disk_trouble(error) is None:
            raise
        raise SystemExit(printable(f"{name}: {error}; make room on its disk. {stop.kept()}")) from None


def finished(run: RunConfig, stop: "Stop", callbacks: Iterable[Callback] = ()) -> dict[str, Any]:
    """Run to the end, print the summary as JSON, and return it; a signal ends the run with SystemExit."""
    made = new_folder(run.name) if run.resume is None and run.output_dir is None and is_first() else None
    run = run if made is None else replace(run, output_dir=made)
    named = run.resume or run.output_dir
    stop.folder, stop.made = named and whole_path(named), made
    try:
        with needs_extra():
            import_for_good("agentgym.train.trainer")  # seconds, in which a stop needs no clearing up
        summary = asyncio.run(stop.cancels(train_policy(run, callbacks=callbacks)))
    except (asyncio.CancelledError, Exception):  # processes that a stop tore apart fail each in its way
        if stop.number is None:
            raise
        stop.say()
        raise SystemExit(128 + stop.number) from None
    finally:
        if made is not None:
            drop_unused(made)
    with stdout_read():
        if is_first():
            print(json.dumps(strict(summary), allow_nan=False))  # noqa: T201  the recipe's result
    return summary


def say_what_is_next(folder: Path, run: RunConfig, typed: str | None = None) -> None:
    """Write lines on stderr that say what to look at after a run; `typed` is how its env was named, if not as in it."""
    if not folder.is_dir():
        return  # it was removed at the end of the run, which was said
    trained = folder / "adapter" if (folder / "adapter").is_dir() else folder / "model"
    lines = [
        f"{command('show', folder, '--best', '3')}, or --worst 3 or --suspicious, prints rollouts as they were",
        f"{command('view', folder)} shows curves, rollouts and tokens in a browser",
        f"{command('report', folder)} writes curves, settings and rollouts into one file",
        f"{shown(folder / METRICS)} has the metrics of each step",
        *(f"{line} plays what was trained on the held-out tasks" for line in _evaluations(run, trained, typed)),
    ]
    if trained.name == "adapter":
        merge = command("merge", trained, "FOLDER")
        lines.append(f"{shown(trained)} is what was trained; {merge} makes a whole model of it")
    for line in under("next", lines) if is_first() else ():
        sys.stderr.write(f"{line}\n")


def _evaluations(run: RunConfig, trained: Path, typed: str | None) -> Iterator[str]:
    """Give the command that evaluates what was trained, for each env of the run."""
    models = [
        word
        for name, role in run.models.items()
        if isinstance(role.engine, TransformersConfig)
        for word in (f"--models.{name}.model", str(role.model))
    ]
    sampling = run.held_out_sampling
    sampled = [] if sampling.temperature == 1 else ["--temperature", f"{sampling.temperature:g}"]
    sampled += [] if sampling.max_tokens is None else ["--max-tokens", str(sampling.max_tokens)]
    values = [(*parameter_in(run.env, name), str(value)) for name, value in run.env_args.items()]
    for env in [run.env] if isinstance(run.env, str) else run.env:
        parameters = [word for of, name, value in values if of == env for word in _flag(f"--env.{name}", value)]
        yield command("eval", typed or env, *parameters, "--model", trained, *sampled, *models)


def _flag(name: str, value: str) -> list[str]:
    """Return the words of a flag: one word if its value could be taken for another flag."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


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
        self.made: Path | None = None
        """The run's folder if it was made for it, and goes again if the run does not begin."""
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
            if self.made is not None:
                drop_unused(self.made)
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
    return _command([*without_flags(arguments, ("--output-dir", "--resume")), "--resume", str(folder)])


def _command(arguments: Sequence[str]) -> str:
    """Give the command line that started this program, with these arguments instead."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix("__main__").removesuffix(".") if spec is not None else ""  # none of a folder
    typed = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    program = ["-m", name] if name else typed if sys.argv[0] == "-c" else [sys.argv[0]]
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    start = ["torchrun", "--nproc-per-node", ranks] if ranks else [sys.executable]
    return shlex.join([*start, *program, *arguments])

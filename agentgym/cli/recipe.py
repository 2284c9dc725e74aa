"""The command line of every recipe: settings as flags, progress on stderr, and one line of JSON on stdout."""

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
from agentgym.files.names import command, drop_unused, refused_path, shown, whole_path
from agentgym.hub import exists, find_model
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
"""Escape sequence that shows the cursor, which the progress bar hides."""
STOPPING = (
    "{name}: stopping after the current training step or weight sync; the sandboxes and the engine are closed, and the "
    "last finished step is saved. Press Ctrl-C to exit at once with the checkpoints that are on disk"
)
"""Message after the first signal, because stopping can take seconds in which nothing else is printed."""


def main(recipe: RunConfig, *, callbacks: Iterable[Callback] = ()) -> None:
    """Run a recipe from the command line.

    Whenever the run is stopped, it saves the last finished step and prints how to resume.

    Flags override the recipe's settings: `--max-steps 40 --train.lr 1e-3`. `--engine sglang` samples through SGLang
    servers, and `--engine module:Class` through a custom engine; the flags under `--engine.` are then that engine's.
    `--teacher-engine` does the same for a teacher. `--help` starts with the docstring of the program.

    The last line on stdout is the summary as JSON. After Ctrl-C, the exit status is 130, and after SIGTERM 143. One
    line on stderr then names the run's folder and the command that resumes it; a second Ctrl-C exits at once. For an
    unknown flag, the exit status is 2, and stderr names the flag. Other errors are reported as one line on stderr, with
    exit status 1: a setting that doesn't fit the env, the model or the folder, an agentgym error, a full disk, or a
    missing package.

    Args:
        recipe: The recipe.
        callbacks: Callbacks that receive the run's events.
    """
    if not isinstance(recipe, RunConfig):
        got = f"the class {recipe.__name__}" if isinstance(recipe, type) else repr(recipe)
        raise SystemExit(f"ag.main: expected a config, as in `ag.main(ag.RunConfig(env=..., model=...))`, got {got}")
    if threading.current_thread() is not threading.main_thread() or _in_loop():
        raise RuntimeError(
            "ag.main: call it in the main thread, outside of an event loop; elsewhere, use `await ag.train_policy(run)`"
        )
    with program(recipe.name) as stop:
        run = settings(recipe, sys.argv[1:], about=sys.modules["__main__"].__doc__ or "")
        summary = finished(run, stop, callbacks)
    say_what_is_next(Path(summary["output_dir"]), run)


def _in_loop() -> bool:
    """Return whether an event loop runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def settings(recipe: RunConfig, words: Sequence[str], *, about: str = "") -> RunConfig:
    """Return the recipe with the command line's settings.

    Args:
        recipe: The recipe.
        words: The words of the command line.
        about: The text at the start of the help.

    Raises:
        RefusedWords: If a flag is refused; the message names it.
    """
    return settings_of(recipe, read_words(recipe, words), about=about)


@contextmanager
def program(name: str) -> Iterator["Stop"]:
    """Handle signals and errors while the body of the `with` runs a recipe.

    A signal stops the run. An error that says what to do is printed as one line.

    Yields:
        The handler of signals, which also describes how much of the run is saved.

    Raises:
        SystemExit: To report such an error.
    """
    stop = Stop()
    try:
        with stop:
            yield stop
    except RefusedWords as error:
        sys.stderr.write(f"{printable(f'{name}: {error}')}; see --help for all options\n")
        raise SystemExit(2) from None
    except NotSaved as error:
        again = resume_command(error.folder, sys.argv[1:])
        raise SystemExit(printable(f"{name}: {error}; to resume: {again}")) from None
    except (AgentGymError, ValueError, TypeError) as error:
        if not is_told(error):
            raise
        raise SystemExit(printable(f"{name}: {error}")) from None
    except OSError as error:
        if (said := refused_path(error, sys.argv[1:])) is not None:
            begun = f". {stop.kept()}" if stop.begun() else ""
            raise SystemExit(printable(f"{name}: {said}{begun}")) from None
        if disk_trouble(error) is None:
            raise
        raise SystemExit(printable(f"{name}: {error}; free space on its disk. {stop.kept()}")) from None


def finished(run: RunConfig, stop: "Stop", callbacks: Iterable[Callback] = ()) -> dict[str, Any]:
    """Run to the end, print the summary as JSON, and return it; a signal ends the run with SystemExit."""
    made = new_folder(run.name) if run.resume is None and run.output_dir is None and is_first() else None
    run = run if made is None else replace(run, output_dir=made)
    named = run.resume or run.output_dir
    stop.folder, stop.made = named and whole_path(named), made
    try:
        if is_first():
            sys.stderr.write(f"{printable(start_line(run))}\n")
        with needs_extra():
            import_for_good("agentgym.train.trainer")  # takes seconds, during which a stop needs no cleanup
            find_model(run.model)  # converting a GGUF file takes seconds, too
        summary = asyncio.run(stop.cancels(train_policy(run, callbacks=callbacks)))
    except (asyncio.CancelledError, Exception):  # after a stop, processes fail in various ways
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


def start_line(run: RunConfig) -> str:
    """Return the first line of a run's log, which is printed before the seconds that importing torch takes."""
    doing = "starting" if run.resume is None else "resuming"
    return f"{doing}: {run.name} on {shown(Path(run.model))}; loading torch and the model"


def say_what_is_next(folder: Path, run: RunConfig, typed: str | None = None) -> None:
    """Print suggestions for after a run on stderr; `typed` is the env's name as typed, if it differs from the run's."""
    if not folder.is_dir():
        return  # it was removed at the end of the run, which was logged
    trained = folder / "adapter" if (folder / "adapter").is_dir() else folder / "model"
    after = "; --phase eval_after chooses those after training" if run.eval_tasks else ""
    lines = [
        f"{command('show', folder, '--best', '3')}, or --worst 3 or --suspicious, prints transcripts{after}",
        f"{command('view', folder)} shows curves, rollouts and tokens in a browser",
        f"{command('report', folder)} writes curves, settings and rollouts into one file",
        f"{shown(folder / METRICS)} has the metrics of each step",
        *(f"{line} evaluates the trained model on the held-out tasks" for line in _evaluations(run, trained, typed)),
    ]
    if trained.name == "adapter":
        merge = command("merge", trained, "FOLDER")
        lines.append(f"{shown(trained)} is the trained adapter; {merge} merges it into a full model")
    for line in under("next", lines) if is_first() else ():
        sys.stderr.write(f"{line}\n")


def _evaluations(run: RunConfig, trained: Path, typed: str | None) -> Iterator[str]:
    """Yield the command that evaluates the trained model, for each env of the run.

    The folder of the trained model contains the run's chat template, so that the command needs only its variables.

    Args:
        run: The run.
        trained: The folder of the trained model.
        typed: The env's name as typed, if it differs from the run's.
    """
    models = [
        word
        for name, role in run.models.items()
        if isinstance(role.engine, TransformersConfig)
        for word in _flag(f"--models.{name}.model", str(role.model))
    ]
    sampling = run.held_out_sampling
    sampled = [] if sampling.temperature == 1 else ["--temperature", f"{sampling.temperature:g}"]
    sampled += [] if sampling.max_tokens is None else ["--max-tokens", str(sampling.max_tokens)]
    pairs = [text for name, value in run.chat_template_kwargs.items() for text in (name, str(value))]
    chat = ["--chat-template-kwargs", *pairs] if pairs else []
    chat += [] if run.tools == "auto" else ["--tools", run.tools]
    values = [(*parameter_in(run.env, name), str(value)) for name, value in run.env_args.items()]
    for env in [run.env] if isinstance(run.env, str) else run.env:
        parameters = [word for of, name, value in values if of == env for word in _flag(f"--env.{name}", value)]
        yield command("eval", typed or env, *parameters, "--model", trained, *sampled, *chat, *models)


def _flag(name: str, value: str) -> list[str]:
    """Return the words of a flag: one word if its value could be mistaken for another flag."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


class Stop:
    """Turns the first SIGINT or SIGTERM into a cancellation of the run.

    Open it before the run starts, and keep it open until the run ends.

    Before the run has started, or has connected to the other processes that torchrun starts, there is nothing to clean
    up, so the process exits at once. Waiting for the others could take forever, since one of them may have been refused
    or killed. A second Ctrl-C always ends the process; a SIGTERM after the first signal, which torchrun sends, is
    ignored.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the first signal, or None if no signal has arrived."""
        self.folder: Path | None = None
        self.made: Path | None = None
        """The run's folder if this process created it, otherwise None. If the run doesn't start, the folder is removed.
        """
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job must ignore Ctrl-C
                self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def cancels(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, which the first signal cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        return await work

    def say(self) -> None:
        """Write one line on stderr with the run's folder and the command that resumes it."""
        if not is_first():
            return
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        # Not with print: a handler may run in the middle of another write.
        os.write(2, f"{cursor}\nStopped by {_name(self.number)}: {self.kept()}\n".encode())

    def begun(self) -> Path | None:
        """Return the run's folder if the run has written its settings there, otherwise None."""
        folder = self.folder and place_now(self.folder)
        return folder if folder is not None and exists(folder / SETTINGS) else None

    def kept(self) -> str:
        """Return a sentence about how much of the run is on disk, with the command that resumes it."""
        folder = self.begun()
        if folder is None:
            return f"nothing was started; to run it: {_command(sys.argv[1:])}"
        done = last_step(folder / CHECKPOINTS)
        kept = f"{done} finished steps are saved" if done else "no step was finished"
        return f"{kept} in {folder}; to resume: {resume_command(folder, sys.argv[1:])}"

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
        if not loop.is_closed():  # otherwise the run has ended
            loop.call_soon_threadsafe(task.cancel)


def _waits_for_others() -> bool:
    """Return whether this process runs with others, some of which haven't connected yet."""
    from agentgym.train.distributed import all_came  # loads torch, which a started run has already loaded

    return not all_came()


def _name(number: int | None) -> str:
    return "Ctrl-C" if number == signal.SIGINT else "SIGTERM"


def resume_command(folder: Path, arguments: Sequence[str]) -> str:
    """Return the command line that resumes the run in `folder`: this one, with --resume instead of its folder."""
    return _command([*without_flags(arguments, ("--output-dir", "--resume")), "--resume", str(folder)])


def _command(arguments: Sequence[str]) -> str:
    """Return the command line that started this program, with these arguments instead."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix("__main__").removesuffix(".") if spec is not None else ""  # empty for a folder
    typed = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    program = ["-m", name] if name else typed if sys.argv[0] == "-c" else [sys.argv[0]]
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    start = ["torchrun", "--nproc-per-node", ranks] if ranks else [sys.executable]
    return shlex.join([*start, *program, *arguments])

"""The command `agentgym sandbox build`: builds the image of Docker sandboxes."""

import logging
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import tyro

from agentgym.cli.output import say
from agentgym.types.transcript import printable

if TYPE_CHECKING:
    from rich.progress import Progress

INTERRUPTED = 130
"""Exit code of a command ended by Ctrl-C or SIGTERM."""
STEP = re.compile(r"Step (\d+)/(\d+)")
"""Docker's numbering of a build's steps."""
WIDEST = 60
"""Maximum characters of the line next to the bar."""


def build(
    from_debootstrap: bool = False,
    base: str | None = None,
    dockerfile: str | None = None,
    pip: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    apt: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    tag: str | None = None,
) -> int:
    """Build the image that Docker sandboxes run, and print its id.

    For example:
    $ agentgym sandbox build
    $ agentgym sandbox build --pip numpy --pip 'pandas>=2' --apt git --tag my-sandbox
    $ agentgym sandbox build --dockerfile folder --tag my-sandbox

    Args:
        from_debootstrap: Build it on a minimal Debian, for machines that can't reach a registry. Needs root.
        base: The image to build on. If it has no python3, this machine's is added.
        dockerfile: A folder with a Dockerfile. The image of that Dockerfile is built first, and this one on top of it.
        pip: A package that code in the sandbox can import; may be given several times.
        apt: A package of the image's Debian or Ubuntu; may be given several times.
        tag: The image's name; by default the one that Docker sandboxes use.
    """
    from agentgym.sandboxes.docker.images import build as image

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM then cleans up as Ctrl-C does.
    try:
        with shown_build():
            made = image.build(
                tag, base=base, dockerfile=dockerfile, from_debootstrap=from_debootstrap, pip=pip, apt=apt
            )
        say(made)
    except KeyboardInterrupt:
        sys.stderr.write("agentgym: the build was interrupted\n")
        return INTERRUPTED
    return 0


@contextmanager
def shown_build() -> Iterator[None]:
    """Show a build's progress on stderr, as a bar with the time left in a terminal, otherwise as timed lines."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(file=sys.stderr)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True)
    handler = _BarHandler(bar) if console.is_terminal else _LineHandler()
    logger = logging.getLogger("agentgym")
    level, began = logger.level, time.monotonic()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        if console.is_terminal:
            with bar:
                yield
        else:
            yield
        sys.stderr.write(f"built in {time.monotonic() - began:.0f} s\n")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _LineHandler(logging.Handler):
    """Writes each line of a build on stderr, after the seconds since the build started."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._began = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{time.monotonic() - self._began:4.0f} s  {printable(record.getMessage())}\n")


class _BarHandler(logging.Handler):
    """Shows the last line of a build next to a bar, which counts Docker's steps."""

    def __init__(self, bar: "Progress") -> None:
        super().__init__(logging.INFO)
        self._bar = bar
        self._task = bar.add_task("building", total=None)

    def emit(self, record: logging.LogRecord) -> None:
        said = printable(record.getMessage()).replace("\n", " ")
        if step := STEP.match(said):
            self._bar.update(self._task, completed=int(step[1]) - 1, total=int(step[2]))
        if record.levelno >= logging.WARNING:
            self._bar.console.print(said, markup=False, highlight=False)
        self._bar.update(self._task, description=said[:WIDEST])

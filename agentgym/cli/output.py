"""Lines on stdout."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from agentgym.errors import AgentGymError
from agentgym.types.transcript import printable


class RefusedWords(AgentGymError):
    """A command line that no command takes; the exit code is 2 then."""


def say(line: str) -> None:
    """Write a line, or several; what would steer the terminal, or what its encoding does not have, is escaped.

    Raises AgentGymError where stdout is closed or refuses what is written, as a full disk does; BrokenPipeError where
    whoever read it has gone.
    """
    _write(line)


def flush() -> None:
    """Write what is still buffered; the errors are those of `say`."""
    _write(None)


def _write(line: str | None) -> None:
    if sys.stdout is None:
        raise AgentGymError("stdout is closed, so nothing can be printed; leave it open, or send it to a file")
    try:
        if line is None:
            sys.stdout.flush()
        else:
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(f"{printable(line).encode(encoding, 'backslashreplace').decode(encoding)}\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        forget_stdout()
        raise AgentGymError(f"stdout cannot be written ({error.strerror}); make room, or send it elsewhere") from error


def forget_stdout() -> None:
    """Let what is still buffered go nowhere: whoever read stdout has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def stdout_read() -> Iterator[None]:
    """End with exit status 141, as SIGPIPE does, if whoever read stdout has gone."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        raise SystemExit(128 + signal.SIGPIPE) from None

"""Output of lines on stdout."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from agentgym.errors import AgentGymError
from agentgym.types.transcript import printable


class RefusedWords(AgentGymError):
    """A command line that no command accepts, for which the exit code is 2."""


def say(line: str) -> None:
    """Print one or more lines, escaping terminal control characters and characters that the encoding can't represent.

    Raises:
        AgentGymError: If stdout is closed or can't be written, as on a full disk.
        BrokenPipeError: If the reader of stdout is gone.
    """
    _write(line)


def flush() -> None:
    """Write the buffered output. Raises the same errors as `say`."""
    _write(None)


def _write(line: str | None) -> None:
    if sys.stdout is None:
        raise AgentGymError("stdout is closed, so nothing can be printed; leave it open, or redirect it to a file")
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
        raise AgentGymError(f"stdout cannot be written ({error.strerror}); free space, or redirect it") from error


def forget_stdout() -> None:
    """Discard the buffered output, because the reader of stdout is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def stdout_read() -> Iterator[None]:
    """Exit with status 141, as SIGPIPE does, if the reader of stdout is gone."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        raise SystemExit(128 + signal.SIGPIPE) from None

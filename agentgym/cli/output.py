"""Lines on stdout."""

import os
import sys


def say(line: str) -> None:
    """Write one line; a character that the terminal's encoding does not have is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"{line.encode(encoding, 'backslashreplace').decode(encoding)}\n")


def forget_stdout() -> None:
    """Let what is still buffered go nowhere: whoever read stdout has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)

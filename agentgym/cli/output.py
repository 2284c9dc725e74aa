"""Lines on stdout."""

import sys


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")

"""The output of a build: each line is logged as it comes, and the last lines are stored for the error message."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator

KEPT_LINES = 30
_log = logging.getLogger("agentgym.sandboxes")


class BuildLog:
    """Logs each line of a build's output at INFO, and stores the last 30 lines, which `str` returns."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def read(self, pieces: Iterable[str | bytes]) -> None:
        """Consume the pieces of text as they come, and log each line once it is complete."""
        for line in _lines(pieces):
            if line.strip():
                self._last.append(line)
                _log.info("%s", line)

    def __str__(self) -> str:
        return "\n".join(self._last)


def announce(text: str) -> None:
    """Log a warning that a long, one-time build starts, because users don't expect the wait."""
    _log.warning("%s", text)


def _lines(pieces: Iterable[str | bytes]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        rest += piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece
        *whole, rest = rest.replace("\r\n", "\n").split("\n")
        yield from whole
    if rest:
        yield rest

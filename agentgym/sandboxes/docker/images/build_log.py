"""The words of a build: each line is logged while it runs, and the last ones are kept for the error."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator

KEPT_LINES = 30
_log = logging.getLogger("agentgym.sandboxes")


class BuildLog:
    """What one build says: a line at INFO for each of its lines; `str` gives the last ones."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def read(self, pieces: Iterable[str | bytes]) -> None:
        """Take in the pieces of text as they come, and log each line when it is whole."""
        for line in _lines(pieces):
            if line.strip():
                self._last.append(line)
                _log.info("%s", line)

    def __str__(self) -> str:
        return "\n".join(self._last)


def announce(text: str) -> None:
    """Say that a build begins, which takes long and is done once: as a warning, for nobody expects the wait."""
    _log.warning("%s", text)


def _lines(pieces: Iterable[str | bytes]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        rest += piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece
        *whole, rest = rest.replace("\r\n", "\n").split("\n")
        yield from whole
    if rest:
        yield rest

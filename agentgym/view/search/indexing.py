"""The thread that keeps the search indexes of the runs that are looked at up to date."""

import logging
import sqlite3
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from agentgym.view.answers import Refused
from agentgym.view.runs import Run
from agentgym.view.search.index import SearchIndex

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""Seconds after which the stores are looked at again once all is indexed."""


class Indexing:
    """Indexes runs from the first time that they are asked for, one batch after the other, in a thread of its own.

    It goes on while the viewer runs, as runs go on writing. A run that cannot be indexed can be looked at all the same.
    """

    def __init__(self) -> None:
        self._indexes: dict[str, SearchIndex | None] = {}
        self._lock = threading.Lock()
        self._wake, self._advanced = threading.Event(), threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="agentgym-search", daemon=True)

    def __enter__(self) -> Self:
        self._spare = tempfile.TemporaryDirectory(prefix="agentgym-view-")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()
        self._spare.cleanup()

    def of(self, run: Run) -> SearchIndex | None:
        """Return the index of a run, which is kept up to date from now on; None where it cannot be had."""
        with self._lock:
            if run.key not in self._indexes:
                self._indexes[run.key] = _opened(run, Path(self._spare.name))
                self._wake.set()
            return self._indexes[run.key]

    def wait_for(self, run: Run, rollouts: int) -> int:
        """Return how many rollouts of a run can be found, once there are at least so many."""
        index = self.of(run)
        if index is None:
            return 0
        with self._advanced:
            self._advanced.wait_for(lambda: index.indexed() >= rollouts)
        return index.indexed()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            with self._lock:
                indexes = [index for index in self._indexes.values() if index is not None]
            more = [self._advance(index) for index in indexes]  # each of them a part
            if True not in more:
                self._wake.wait(LOOK_AGAIN_S)

    def _advance(self, index: SearchIndex) -> bool:
        try:
            more = index.advance()
        except Refused:  # no store yet, or one that is being replaced
            return False
        except Exception as error:  # the other runs are indexed on
            log.warning("%s: it is not indexed on: %s: %s", index.path, type(error).__name__, error)
            with self._lock:
                self._indexes[index.run.key] = None
            return False
        with self._advanced:
            self._advanced.notify_all()
        return more


def _opened(run: Run, spare: Path) -> SearchIndex | None:
    try:
        return SearchIndex(run, spare)
    except (sqlite3.Error, OSError) as error:
        log.warning("%s: it cannot be searched: %s: %s", run.folder, type(error).__name__, error)
        return None

"""The thread that keeps the search indexes of viewed runs up to date."""

import logging
import threading
import time
from contextlib import ExitStack
from typing import Literal, Self

from agentgym.machine.process_identity import lent_folder, sweep_folders
from agentgym.view.answers import Refused
from agentgym.view.runs import Run
from agentgym.view.search.cache import cache_folder
from agentgym.view.search.index import SearchIndex, Unsearchable

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""Seconds between checks of the stores once everything is indexed."""
TRY_AGAIN_S = 20.0
"""Seconds until a run that couldn't be indexed is retried, if it is still being viewed."""


class Indexing:
    """Indexes each run from its first request on, one batch after another, in a separate thread.

    Indexing continues while the viewer runs, because runs keep writing. A run that can't be indexed can still be
    viewed, and is retried later.
    """

    def __init__(self) -> None:
        self._indexes: dict[str, SearchIndex] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        """Time and reason of a run's indexing failure, by the run's key."""
        self._crowded: set[str] = set()
        """Keys of runs whose index doesn't fit on the cache's disk."""
        self._lock = threading.Lock()
        self._wake, self._advanced = threading.Event(), threading.Condition()
        self._stopped, self._opened = False, ExitStack()
        self._thread = threading.Thread(target=self._run, name="agentgym-search", daemon=True)

    def __enter__(self) -> Self:
        sweep_folders()
        self._spare = self._opened.enter_context(lent_folder("view"))
        self._folder = cache_folder() or self._spare
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()
        self._opened.close()

    def of(self, run: Run) -> SearchIndex | None:
        """Return the index of a run, kept up to date from here on, or None if it isn't available for now."""
        with self._lock:
            if run.key not in self._indexes and self._is_due(run):
                self._open(run)
            return self._indexes.get(run.key)

    def indexed(self, run: Run) -> int | None:
        """Return how many rollouts of a run are indexed, or None if it can't be searched for now."""
        index = self.of(run)
        try:
            return None if index is None else index.indexed()
        except Unsearchable:
            return None

    def why(self, run: Run) -> str:
        """Return why a run has no index, or "" if it has one or was never requested."""
        with self._lock:
            return self._failed.get(run.key, (0.0, ""))[1]

    def wait_for(self, run: Run, rollouts: int) -> int:
        """Wait until at least this many rollouts of a run are indexed, and return the number of indexed ones."""
        index = self.of(run)
        if index is None:
            return 0
        with self._advanced:
            self._advanced.wait_for(lambda: index.indexed() >= rollouts)
        return index.indexed()

    def _is_due(self, run: Run) -> bool:
        return run.key not in self._failed or time.monotonic() - self._failed[run.key][0] >= TRY_AGAIN_S

    def _open(self, run: Run) -> None:
        self._indexes[run.key] = SearchIndex(run, self._spare if run.key in self._crowded else self._folder)
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            with self._lock:
                indexes = list(self._indexes.values())
            more = [self._advance(index) for index in indexes]  # one batch of each
            if True not in more:
                self._wake.wait(LOOK_AGAIN_S)

    def _advance(self, index: SearchIndex) -> bool:
        """Index a batch and return whether there may be more. On any error, the other runs are still indexed."""
        try:
            more = index.advance()
        except Unsearchable as error:
            return self._moved(index) if error.is_disk_full else self._set_aside(index.run, error)
        except Refused:  # no store yet, or one that is being replaced
            return False
        except Exception as error:
            return self._set_aside(index.run, error)
        with self._advanced:
            self._advanced.notify_all()
        return more

    def _moved(self, index: SearchIndex) -> bool:
        """Start the index anew in the temporary folder, because the cache's disk is full; this happens once per run.

        If the temporary folder is full, too, set the run aside. Return whether the index was started anew.
        """
        index.remove()
        with self._lock:
            if index.run.key not in self._crowded:
                self._crowded.add(index.run.key)
                self._open(index.run)
                return True
        return self._set_aside(index.run, OSError("no disk has space for an index"))

    def _set_aside(self, run: Run, error: Exception) -> Literal[False]:
        """Set the run aside to be tried again later, logging each new error once."""
        said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        with self._lock:
            if said != self._failed.get(run.key, (0.0, ""))[1]:
                log.warning("%s: cannot be indexed for now: %s", run.folder, said)
            self._failed[run.key] = (time.monotonic(), said)
            self._indexes.pop(run.key, None)
        return False

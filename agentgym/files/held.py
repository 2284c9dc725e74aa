"""The folder that a process writes to, which is found again after a move and recreated after a removal."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentgym.files.names import free_name

_MOVED: dict[Path, Path] = {}
"""Current paths of folders that this process has written to, by their former paths."""


@dataclass(frozen=True, slots=True)
class Change:
    """Reports that a folder has moved or was replaced."""

    path: Path
    """Where to write from now on."""
    lost: bool
    """Whether the folder's content is gone and the folder at `path` is new."""
    said: str
    """A sentence that reports the change."""


class HeldFolder:
    """Tracks a folder's location, even after a move, through an open handle (Linux); safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.RLock()
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Close the handle and stop tracking the folder."""
        with self._turn:
            os.close(self._handle)

    def follow(self) -> Change | None:
        """Find the folder again if it was moved or removed since the last call; return the change, or None without one.

        A folder that was removed or is out of reach is recreated, at its old path or, if something else is there now,
        next to it.

        Raises:
            OSError: If it can't be created now; the next call tries again.
        """
        with self._turn:
            return None if self.is_at(self.path) else self._gone_after()

    def _gone_after(self) -> Change:
        before = self.path
        if (now := self._moved_to()) is not None:
            self._stand_at(now)
            said = f"The folder {before} was moved to {now} while it was written to; all later files are written there."
            return Change(now, lost=False, said=said)
        now = self._made_anew()
        beside = "" if now == before else f", and another folder is at its path: {now} was created next to it"
        return Change(
            now,
            lost=True,
            said=(
                f"The folder {before} was removed while it was written to{beside}. Settings, metrics and rollouts so "
                f"far are written again to {now}, and later ones too; its other files are lost."
            ),
        )

    def leave(self) -> Change:
        """Leave this folder to another process that has taken it, and use a new folder next to it from now on.

        Raises:
            OSError: If the new folder can't be created.
        """
        with self._turn:
            before, now = self.path, self._made_anew()
        said = f"Another process has taken the folder {before}: the remaining output is written to {now}."
        return Change(now, lost=True, said=said)

    def _made_anew(self) -> Path:
        """Create a folder under a free name and track it instead of this one, which stays tracked if that fails."""
        now = free_name(self.path)
        now.mkdir(parents=True)
        try:
            fresh = os.open(now, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            now.rmdir()
            raise
        os.close(self._handle)
        self._handle = fresh
        self._stand_at(now)
        return now

    def _stand_at(self, path: Path) -> None:
        for old, place in list(_MOVED.items()):
            if place == self.path:
                _MOVED[old] = path
        _MOVED[self.path] = path
        self.path = path

    def is_at(self, path: Path) -> bool:
        """Return whether the folder is at the path; also True if that can't be determined (a server is down)."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def now(self) -> Path | None:
        """Return the folder's current path, or None if it was removed."""
        with self._turn:
            return self.path if self.is_at(self.path) else self._moved_to()

    def _moved_to(self) -> Path | None:
        with suppress(OSError):
            found = Path(f"/proc/self/fd/{self._handle}").readlink()
            if found.is_dir() and os.path.samestat(os.fstat(self._handle), found.stat()):
                return found
        return None


def place_now(path: Path) -> Path:
    """Return the current path of the folder that was at `path` when this process started writing to it."""
    return _MOVED.get(path, path)

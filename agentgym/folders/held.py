"""The folder that a process writes to, found again when it was moved, and made again when it was removed."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentgym.folders.names import free_name

_MOVED: dict[Path, Path] = {}
"""Where folders that this process has written to are now, by where they were."""


@dataclass(frozen=True, slots=True)
class Change:
    """Says that a folder is no longer where it was."""

    path: Path
    """Where to write from now on."""
    lost: bool
    """Whether what was in the folder is gone: the one at `path` is new."""
    said: str
    """A sentence about it."""


class HeldFolder:
    """Knows where a folder is, also after it was moved; Linux finds it by an open handle."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        """Forget the folder."""
        os.close(self._handle)

    def follow(self) -> Change | None:
        """Return what has happened to the folder since the last call, and stand at its new place; None for nothing.

        A folder that was removed, or is out of reach, is made anew: at its old place, or beside what is there now.
        """
        if self._is_at(self.path):
            return None
        before = self.path
        if (now := self._moved_to()) is not None:
            self._stand_at(now)
            said = f"The folder {before} was moved to {now} while it was written to; what follows is written there."
            return Change(now, lost=False, said=said)
        os.close(self._handle)
        now = free_name(before)
        now.mkdir(parents=True)
        self._handle = os.open(now, os.O_RDONLY | os.O_DIRECTORY)
        self._stand_at(now)
        beside = "" if now == before else f", and another one is in its place: {now} was made beside it"
        return Change(
            now,
            lost=True,
            said=(
                f"The folder {before} was removed while it was written to{beside}. Settings, figures and rollouts so "
                f"far are written again into {now}, and what follows too; other files of it are lost."
            ),
        )

    def leave(self) -> Change:
        """Make a new folder beside this one, which another process has taken, and stand there from now on."""
        before = self.path
        os.close(self._handle)
        now = free_name(before)
        now.mkdir(parents=True)
        self._handle = os.open(now, os.O_RDONLY | os.O_DIRECTORY)
        self._stand_at(now)
        said = f"Another process has taken the folder {before}: what was trained is written to {now}."
        return Change(now, lost=True, said=said)

    def _stand_at(self, path: Path) -> None:
        for old, place in list(_MOVED.items()):
            if place == self.path:
                _MOVED[old] = path
        _MOVED[self.path] = path
        self.path = path

    def _is_at(self, path: Path) -> bool:
        """Whether the folder is at the path; True too if that cannot be told, as of a server that does not answer."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _moved_to(self) -> Path | None:
        with suppress(OSError):
            found = Path(f"/proc/self/fd/{self._handle}").readlink()
            if os.path.samestat(os.fstat(self._handle), found.stat()):
                return found
        return None


def place_now(path: Path) -> Path:
    """Return where a folder is that was at this path when this process began to write to it."""
    return _MOVED.get(path, path)

"""The lock on a run's folder, which lets only one process at a time write to it."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from agentgym.errors import AgentGymError
from agentgym.files.disk import Refusals
from agentgym.files.file_systems import has_locks, shared_kind
from agentgym.files.foreign.opening import check_folder
from agentgym.files.held import Change, HeldFolder
from agentgym.files.names import cannot_be_made
from agentgym.machine.process_identity import owner, state_of

_LOG = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the lock file in the run's folder; it contains the PID of the process that holds it."""


class FolderInUse(AgentGymError):
    """Another process is using this folder; the message names the process."""


def make_folder(folder: Path) -> None:
    """Create the output folder if it doesn't exist.

    Raises:
        ValueError: If it can't be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_made(folder, error) from None


def files_in(folder: Path) -> list[str]:
    """Return the sorted names of a folder's entries, without hidden ones."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


class LockedFolder(HeldFolder):
    """A folder that only this process writes to, provided that other processes see its lock."""

    def __init__(self, path: Path) -> None:
        self._lock = _locked(path / LOCK)
        self._refusals = Refusals(_LOG.warning)
        super().__init__(path)

    def close(self) -> None:
        """Remove the lock and release the folder."""
        place = self.now()
        with suppress(OSError):  # The disk may reject writes by now; the next process sees that the lock is free.
            if place is not None and _is_ours(self._lock, place / LOCK):
                (place / LOCK).unlink()  # Still locked, so this can't be another process's file.
        os.close(self._lock)
        super().close()

    def follow(self) -> Change | None:
        """Find the folder again if it was moved or removed since the last call, and keep it locked.

        A folder that was removed or is out of reach is recreated, as in `HeldFolder.follow`.

        Returns:
            The change, or None without one.

        Raises:
            FolderInUse: If another process has taken the folder.
            OSError: If a removed folder can't be recreated now; the next call tries again.
        """
        with self._turn:
            change = super().follow()
            try:  # If it can't be checked, assume nothing changed.
                if (change is not None and change.lost) or not _is_ours(self._lock, self.path / LOCK):
                    self._lock_again()
            except (OSError, ValueError) as error:
                self._refusals.refused(str(self.path / LOCK), str(error), then="the next write tries again")
            return change

    def _lock_again(self) -> None:
        """Lock the folder again after its lock file was removed or replaced."""
        try:
            fresh = _locked(self.path / LOCK)
        except FolderInUse as taken:
            raise FolderInUse(
                f"{taken}. The lock file of the folder was removed while this process was writing to the folder, and "
                "the other process took the folder: this process ends and leaves the folder to it"
            ) from None
        os.close(self._lock)
        self._lock = fresh


@contextmanager
def hold_folder(folder: Path) -> Iterator[LockedFolder]:
    """Lock a run's folder while the block runs.

    The lock file is removed at the end. If a process is killed, its file stays, but the kernel unlocks it and the
    next run takes it over. The lock works only among processes that see the same file system's locks. On a file
    system without locks the file itself is the lock, and names the process and its machine; see `_claimed`.

    Args:
        folder: The folder.

    Raises:
        FolderInUse: If a running process has locked it.
        UnreadableFileError: If it contains a link that leads out of it, a pipe or a device.
        ValueError: If it can't be written to.
    """
    check_folder(folder)
    with closing(LockedFolder(folder)) as held:
        yield held


def _is_ours(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _locked(path: Path) -> int:
    """Open and lock the lock file, write this process's PID into it, and return its file descriptor.

    If another process removes the file in between, start again with a new file.

    Raises:
        FolderInUse: If another process has locked the file.
    """
    if not has_locks(path.parent, fcntl.flock):
        return _claimed(path)
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(file, 400, 0).decode(errors="replace"))
            os.close(file)
            raise _in_use(path, f"process {holder}") from None
        except BaseException:
            os.close(file)
            raise
        if _is_ours(file, path):
            _write(file, f"{os.getpid()}\n")
            return file
        os.close(file)


def _claimed(path: Path) -> int:
    """Create the lock file on a file system without locks, and return its file descriptor.

    If the file of another process exists, it is replaced only if that process is known to have ended, which requires
    that it ran on this machine. The state of a process on another machine is unknown. The error's message then says
    which file to remove once that process has ended.

    Raises:
        FolderInUse: If the file exists and its process may still run.
    """
    while True:
        try:
            file = _opened(path, os.O_EXCL)
        except FileExistsError:
            _take_from_the_dead(path)
            continue
        _write(file, f"{os.getpid()}\n{owner()}\n")
        kind = shared_kind(path.parent)
        _LOG.warning(
            "%s is on a file system without locks%s: the file %s is the lock. If this process is killed, remove that "
            "file before another machine continues. Mount the file system with locks (Lustre: -o flock; NFS: with its "
            "lock service), or choose a folder on another disk",
            *(path.parent, f" ({kind})" if kind else "", path.name),
        )
        return file


def _take_from_the_dead(path: Path) -> None:
    """Remove the lock file of a process that has ended.

    Raises:
        FolderInUse: If the process runs, or if its state is unknown.
    """
    try:
        said = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    who = said.splitlines()[1] if said.count("\n") > 1 else ""
    state = state_of(who)
    if state == "ended":
        taken = path.with_name(f"{path.name}-{os.getpid()}")
        with suppress(OSError):
            path.rename(taken)
            if taken.read_text(errors="replace") != said:  # Another process was faster, and this is its file.
                os.link(taken, path)
            taken.unlink()
        return
    place = f" on {who.partition('/')[0]}" if who else ""
    if state == "alive":
        raise _in_use(path, f"process {_holder(said)}{place}")
    raise FolderInUse(
        f"output_dir, resume: {path.parent} is in use by process {_holder(said)}{place} according to {path}, and this "
        "machine cannot tell whether that process still runs; if it has ended, remove that file"
    )


def _in_use(path: Path, who: str) -> FolderInUse:
    return FolderInUse(
        f"output_dir, resume: {path.parent} is in use by {who}; wait until it ends, stop it, or choose another folder"
    )


def _holder(said: str) -> str:
    """Return the PID on the first line of a lock file's content, or "unknown" if that line is empty."""
    return said.split("\n")[0].strip()[:20] or "unknown"


def _write(file: int, text: str) -> None:
    """Write who holds the lock; on a full disk the file stays empty, and the lock works all the same."""
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _opened(path: Path, more: int = 0) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | more, 0o644)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"output_dir, resume: {path.parent} cannot be written to ({error.strerror}); fix its permissions, or "
            "choose another folder"
        ) from None

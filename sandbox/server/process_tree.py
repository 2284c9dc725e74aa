"""All processes below the supervisor: finding, stopping, continuing, killing and reaping them."""

from __future__ import annotations

import os
import signal
import time

from .children import ENDED, Exits
from .limits import ALONE, KILL_S, LISTS_CHILDREN, PROC
from .space import Space

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Iterable


def children(pid: int) -> list[int]:
    """Return the living children and unreaped zombies of a process, over all its threads."""
    if not LISTS_CHILDREN:
        return [child for child, parent in parents().items() if parent == pid]
    found: list[int] = []
    try:
        for thread in names(f"{pid}/task"):
            found += map(int, content(f"{pid}/task/{thread}/children").split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def names(path: str) -> list[str]:
    """Return the names in a folder of the /proc that shows our processes."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=PROC)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY, dir_fd=PROC)
    with open(fd, "rb") as file:
        return file.read()


def parents() -> dict[int, int]:
    """Return every process here with its parent's id, for a kernel that lists no children (gVisor's)."""
    found: dict[int, int] = {}
    for name in names("."):
        if name.isdigit():
            try:
                found[int(name)] = int(content(f"{name}/stat").rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def descendants(root: int) -> dict[int, int]:
    """Return every process below `root` with its parent's id, parents first.

    No process can hide as an orphan: because we are a subreaper, the kernel makes orphans our children. In a space (a
    process namespace), they become children of its first process, which is one of ours and is not included.
    """
    tree: dict[int, int] = {}
    snapshot = None if LISTS_CHILDREN else parents()
    queue = [root]
    for parent in queue:
        below = children(parent) if snapshot is None else [pid for pid, above in snapshot.items() if above == parent]
        for pid in below:
            if pid not in tree:
                tree[pid] = parent
                queue.append(pid)
    for pid in Space.first_processes:
        tree.pop(pid, None)
    return tree


def unix_session(pid: int) -> int:
    """Return the id of a process's Unix session, or 0 if the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def send_signal(pid: int, parent: int, number: int) -> None:
    """Signal a process if it is still the child of `parent`, so that another process that got its number is spared."""
    try:
        if Exits.pipe is not None:
            if pid in children(parent):
                os.kill(pid, number)
            return
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if pid in children(parent):
            signal.pidfd_send_signal(fd, number)
    except OSError:
        pass
    finally:
        os.close(fd)


def family(tree: dict[int, int], roots: Iterable[int]) -> set[int]:
    """Return the roots and all processes in `tree` that they started.

    Daemons whose parents are gone are found, too, because they keep the parents' Unix session.
    """
    known = set(roots)
    for pid, parent in tree.items():  # Parents come before their children.
        if parent in known or unix_session(pid) in known:
            known.add(pid)
    return known.intersection(tree)


def reap(*, adopted: bool = True) -> None:
    """Reap ended processes without waiting; the exit codes of our own children are recorded.

    In the code's space (its process namespace), the first process reaps for us. Without `adopted`, it is woken for that
    only if it has orphans, so ended processes that it has adopted (`Space.adopt`) may stay unreaped.
    """
    if Space.current is not None and (adopted or Space.current.has_orphans()):
        Space.current.reap()
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in ENDED:
                ENDED[pid] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        pass


def kill_family(root: int) -> None:
    """Kill one of our children and everything that it started; all are stopped first, so none can fork meanwhile."""
    me = os.getpid()
    end = time.monotonic() + KILL_S
    known, stopped = {root}, {0}
    while time.monotonic() < end:
        tree = descendants(me)
        known |= family(tree, known)
        moving = known.intersection(tree) - stopped
        if not moving:
            break
        for pid in moving:
            send_signal(pid, tree[pid], signal.SIGSTOP)
        stopped |= moving
    while time.monotonic() < end:
        reap()
        tree = descendants(me)
        victims = [pid for pid in reversed([*tree]) if pid in known]  # Children before their parents.
        if not victims:
            return
        for pid in victims:
            send_signal(pid, tree[pid], signal.SIGKILL)
        time.sleep(0.0005)


def kill_all_but(spare: set[int], *, roots: Iterable[int] = ()) -> bool:
    """Kill our descendants, except those in `spare` and those that one of the `roots` started.

    Returns whether all of the others are gone.
    """
    me = os.getpid()
    end = time.monotonic() + KILL_S
    while True:
        reap()
        tree = descendants(me)
        spared = spare | family(tree, roots)
        victims = {pid: parent for pid, parent in tree.items() if pid not in spared}
        if not victims:
            return True
        if time.monotonic() > end:
            return False
        for pid, parent in victims.items():
            send_signal(pid, parent, signal.SIGKILL)
        mine = [pid for pid, parent in victims.items() if parent == me]
        for pid in mine:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue
        if not mine:
            time.sleep(0.0005)


def kill_all() -> bool:
    """Kill everything below us; return whether nothing is left."""
    if Space.current is not None:
        Space.current.signal_all(signal.SIGKILL)  # One call, so no fork can slip through.
    if Space.current is not None or not ALONE:
        return kill_all_but(set())
    try:
        os.kill(-1, signal.SIGKILL)  # One call, so no fork can slip through.
    except ProcessLookupError:
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return not children(os.getpid())


def go_on(stopped: dict[int, int]) -> None:
    for pid, parent in stopped.items():
        send_signal(pid, parent, signal.SIGCONT)


def stop_all() -> dict[int, int]:
    """Stop everything below us and return the stopped processes."""
    if Space.current is not None:
        Space.current.signal_all(signal.SIGSTOP)
        return descendants(os.getpid())
    if ALONE:
        try:
            os.kill(-1, signal.SIGSTOP)
        except ProcessLookupError:
            pass
        return descendants(os.getpid())
    stopped: dict[int, int] = {}
    while True:
        tree = descendants(os.getpid())
        if tree.keys() <= stopped.keys():
            return tree
        for pid in tree.keys() - stopped.keys():
            send_signal(pid, tree[pid], signal.SIGSTOP)
        stopped.update(tree)

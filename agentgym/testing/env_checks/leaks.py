"""Search for threads, processes, files, temporary folders and asyncio tasks that some code left behind."""

import asyncio
import gc
import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from agentgym.machine.clock import THREAD as CLOCK_THREAD

THREAD_GRACE_S = 2.0
"""Maximum wait for the end of a thread, in seconds."""
TOOL_GRACE_S = 10.0
"""Maximum wait for the end of a plain tool's or reward's thread, in seconds."""
PROCESS_GRACE_S = 1.0
"""Maximum wait for the end of a child process, in seconds."""
TASK_GRACE_S = 1.0
"""Maximum wait for the end of an asyncio task, in seconds."""

_PYTHONS_OWN = re.compile(r"from multiprocessing\.(resource_tracker|forkserver) import main")
"""The commands of the processes that Python starts with the first process pool and keeps until it exits."""
_made_now: list[list[str]] = []
"""Lists to which each new temporary file and folder of this process is added."""


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _made_now and event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
        for made in _made_now:
            made.append(os.fsdecode(arguments[0]))


_heard = threading.Event()


class LeakWatch:
    """Watches a block of code that should leave nothing behind; `left()` describes anything that it left.

    Anything that the process had before the block doesn't count. With `processes=False`, child processes and the
    library's own threads and tasks don't count either, because an open pool of sandboxes starts them when it needs
    them.
    """

    def __init__(self, *, processes: bool = True) -> None:
        self.processes = processes
        self.temporary: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.tasks_left: list[str] = []

    def __enter__(self) -> Self:
        if not _heard.is_set():
            _heard.set()
            sys.addaudithook(_hear)
        self.threads = set(threading.enumerate())
        self.children = _children()
        self.files = _open_files()
        _made_now.append(self.temporary)
        return self

    def __exit__(self, *_: object) -> None:
        if any(made is self.temporary for made in _made_now):
            _made_now[:] = [made for made in _made_now if made is not self.temporary]

    def left(self) -> list[str]:
        """Return a line for each thing that is left, after a short wait for threads and processes to end."""
        return [*self._left_threads(), *self._left_processes(), *self._left_files(), *self._left_temporary()]

    def _left_threads(self) -> Iterator[str]:
        ours = (threading.current_thread(), *(t for t in threading.enumerate() if t.name == CLOCK_THREAD))
        new = [t for t in threading.enumerate() if t not in self.threads and t not in ours]
        new = [t for t in new if not t.name.startswith("asyncio_")]
        if not self.processes:
            new = [t for t in new if not t.name.startswith("agentgym")]
        start = time.monotonic()
        for thread in new:
            grace = TOOL_GRACE_S if thread.name.startswith("agentgym-") else THREAD_GRACE_S
            thread.join(max(start + grace - time.monotonic(), 0.0))
        for thread in new:
            if thread.is_alive():
                yield f"the thread {thread.name!r} is still running{_where(thread)}"

    def _left_processes(self) -> Iterator[str]:
        found = _children() - self.children if self.processes else set()
        new = {pid for pid in found if not _PYTHONS_OWN.search(_command(pid))}
        start = time.monotonic()
        for pid in new:
            _wait_for_end(pid, max(start + PROCESS_GRACE_S - time.monotonic(), 0.0))
        if new & _children():
            gc.collect()  # An unreferenced process object reaps its process when it is deleted.
        for pid in sorted(new & _children()):
            yield f"the process {pid} ({_command(pid)}) {'was never waited for' if _ended(pid) else 'is still running'}"

    def _left_files(self) -> Iterator[str]:
        if _open_files() - self.files:
            gc.collect()
        for _, path in sorted(_open_files() - self.files):
            yield f"the file {path} is still open"

    def _left_temporary(self) -> Iterator[str]:
        for path in self.temporary:
            if os.path.lexists(path):
                kind = "folder" if Path(path).is_dir() else "file"
                yield f"the temporary {kind} {path} still exists"

    def see_tasks(self) -> None:
        """Record the event loop's current asyncio tasks, which `left_tasks` doesn't report."""
        self.tasks = set(asyncio.all_tasks())

    async def left_tasks(self) -> list[str]:
        """Return a line for each new asyncio task of the event loop that hasn't ended."""
        new = asyncio.all_tasks() - self.tasks - {asyncio.current_task()}
        if new:
            await asyncio.wait(new, timeout=TASK_GRACE_S)
        named = [(task, _coroutine(task)) for task in new if not task.done()]
        return [
            f"the asyncio task {task.get_name()!r} ({name}) is still running"
            for task, name in named
            if self._is_foreign(task)
        ]

    def _is_foreign(self, task: "asyncio.Task[Any]") -> bool:
        code = getattr(task.get_coro(), "cr_code", None)
        return self.processes or code is None or f"{os.sep}agentgym{os.sep}" not in code.co_filename


def _coroutine(task: "asyncio.Task[Any]") -> str:
    return getattr(task.get_coro(), "__qualname__", repr(task.get_coro()))


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _children() -> set[int]:
    """Return the ids of this process's children, on Linux, where each thread lists those that it started."""
    found: set[int] = set()
    with suppress(OSError):
        for path in Path("/proc/self/task").glob("*/children"):
            with suppress(OSError):
                found |= {int(pid) for pid in path.read_text().split()}
    return found


def _wait_for_end(pid: int, seconds: float) -> None:
    """Wait for at most `seconds` until the process has ended; its owner still has to reap it."""
    try:
        ended = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return
    try:
        select.select([ended], [], [], seconds)
    finally:
        os.close(ended)


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        return line[:200] or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _open_files() -> set[tuple[int, str]]:
    """Return the descriptor and path of the regular files that this process has open, on Linux."""
    found: set[tuple[int, str]] = set()
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(link)  # noqa: PTH115
                if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/memfd:")):
                    found.add((int(link.name), target))
    return found

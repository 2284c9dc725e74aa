"""The process that runs the code of `python` calls, called cells; the code shares the memory of the process."""

from __future__ import annotations

import gc
import json
import linecache
import os
import signal
import sys
import traceback
import types
from _ast import Expr, Expression, Module, PyCF_ONLY_AST
from _signal import signal as set_handler  # type: ignore[import-not-found]  # Without the enums, which take ten times as long.
from _thread import allocate_lock

from .frames import WorkerEnd, write_frame
from .imports import OwnImports
from .limits import CHANNEL, CHANNEL_LOST, FOLDER, LENGTH, MAX_ASK
from .session_fork import is_parent_of_a_fork

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


def run_cells(work: str, private: str = "") -> NoReturn:
    """Run cells as a worker; `Worker` explains `private`."""
    gc.enable()
    Worker(work, private=private).serve()


class Worker:
    """The process that runs Python cells; after the first cell, nothing that it reports is trusted."""

    def __init__(self, work: str, *, private: str = "") -> None:
        """Create a session in `work`.

        With a `private` folder, create a process instead that no file in `work` can affect.
        """
        self.pid = os.getpid()
        self.work = work
        self.call = 0
        self.asked = 0
        self.cells = 0
        self.running = False
        self.lock = allocate_lock()
        self.inlet = WorkerEnd()
        self.proxies: dict[str, object] = {}
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.names = main.__dict__
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # As in any Python: raise OSError instead of dying.
        os.environ.update(private_folder(private) if private else own_folder(work))
        if private:
            sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
            # Neither a verifier nor a library that it imports may find modules that the code under test left in the
            # folder.
            OwnImports(work, ("<cell ",)).install()
        sys.path.insert(len(sys.path) if private else 0, work)

    def serve(self) -> NoReturn:
        """Run cells until the channel closes."""
        while True:
            try:
                envelope, body = self.inlet.read(None)
                if "fork" in envelope:
                    self.branch(envelope["fork"])
                    continue
                if "functions" not in envelope:
                    continue  # The answer to an interrupted host function call.
                self.call = envelope["id"]
                self.offer(envelope["functions"])
                code = self.run(body.decode("utf-8", "replace"))
                if os.getpid() != self.pid:
                    os._exit(0)  # A forked child that left the cell must not answer a second time.
                said = b'{"id": %d, "done": %d}' % (self.call, code)
                os.write(CHANNEL, LENGTH.pack(len(said)) + said)
            except KeyboardInterrupt:
                continue
            except BaseException:
                os._exit(CHANNEL_LOST)

    def branch(self, folder: str) -> None:
        """Return twice: here, and in a process that continues as a separate session in `folder`."""
        self.inlet.take(1, None)  # The byte that the descriptors come with.
        ends, self.inlet.fds = self.inlet.fds, []
        random = sys.modules.get("random")
        state = random.getstate() if random is not None else None
        if is_parent_of_a_fork():
            for fd in ends:
                os.close(fd)
            return
        for end, fd in zip(ends, (CHANNEL, 1, 2)):
            os.dup2(end, fd, inheritable=fd != CHANNEL)
        for end in {*ends} - {CHANNEL, 1, 2}:
            os.close(end)
        self.pid = os.getpid()
        self.lock = allocate_lock()
        if random is not None:
            random.setstate(state)  # Python reseeds it in a forked child; a branch continues like the trunk.
        self.move(folder)
        os.write(CHANNEL, b"\0")

    def move(self, folder: str) -> None:
        """Move from the old working folder into its copy."""
        here = os.getcwd()
        sys.path[:] = [folder if path == self.work else path for path in sys.path]
        os.environ.update(own_folder(folder))
        if "tempfile" in sys.modules:
            sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
        inside = here == self.work or here.startswith(self.work + "/")
        try:
            os.chdir(folder + here[len(self.work) :] if inside else here)
        except OSError:
            os.chdir(folder)
        self.work = folder

    def run(self, source: str) -> int:
        """Run one cell and return its exit code."""
        self.cells += 1
        set_handler(signal.SIGINT, self.interrupt)
        code = 1
        try:
            try:
                self.running = True
                code = self.execute(source, f"<cell {self.cells}>")
            finally:
                self.running = False
                flush()
        except BaseException as error:
            report(error)
        return code

    def execute(self, source: str, filename: str) -> int:
        try:
            tree = compile(source, filename, "exec", PyCF_ONLY_AST, dont_inherit=True)
            assert isinstance(tree, Module)
            linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
            if tree.body:
                exec(compile(tree, filename, "exec", dont_inherit=True), self.names)
            if isinstance(last, Expr):
                value = eval(compile(Expression(last.value), filename, "eval", dont_inherit=True), self.names)
                if value is not None:
                    sys.stdout.write(repr(value) + "\n")
        except SystemExit as leaving:
            return exit_code(leaving)
        return 0

    def interrupt(self, _number: int, _frame: types.FrameType | None) -> None:
        if self.running:
            raise KeyboardInterrupt

    def offer(self, names: list[str]) -> None:
        """Bind this call's host functions and remove those of the last call."""
        for name, proxy in self.proxies.items():
            if self.names.get(name) is proxy:
                del self.names[name]
        self.proxies = {name: self.proxy(name) for name in names}
        self.names.update(self.proxies)

    def proxy(self, name: str) -> Callable[..., object]:
        def function(*args: object, **kwargs: object) -> object:
            return self.ask(name, args, kwargs)

        function.__name__ = function.__qualname__ = name
        return function

    def ask(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call a host function.

        Raises:
            RuntimeError: If the host function failed, with the host's text, or if no cell is running in this process.
            ValueError: If the arguments are too large.
        """
        if not self.running or os.getpid() != self.pid:
            raise RuntimeError(f"{name} can only be called from a running cell, in the cell's own process")
        body = json.dumps([name, args, kwargs]).encode()
        if len(body) > MAX_ASK:
            raise ValueError(f"{name}: the arguments have {len(body)} bytes, but the limit is {MAX_ASK}")
        with self.lock:
            self.asked += 1
            write_frame(CHANNEL, {"id": self.call, "ask": self.asked}, [body])
            while True:
                envelope, answer = self.inlet.read(None)
                if envelope.get("answer") == self.asked:
                    break
        said = json.loads(answer)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["value"]


def own_folder(work: str) -> dict[str, str]:
    """Return the part of a session's environment that points to its folder."""
    return {"HOME": work, "TMPDIR": work}


def private_folder(folder: str) -> dict[str, str]:
    """Return the environment of a process that finds no startup file, cache or package of the session."""
    caches = {"PYTHONPYCACHEPREFIX": folder + "/pycache", "PYTHONNOUSERSITE": "1"}
    return {"HOME": folder, "TMPDIR": folder, **caches}


def exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def report(error: BaseException) -> None:
    """Print the traceback on stderr, without our own frames."""
    try:
        shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
        assert shown is not None
        lines = shown
        while shown is not None:
            shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(FOLDER)]
            shown = shown.__cause__ or shown.__context__
        sys.stderr.write("".join(lines.format()))
        flush()
    except BaseException:
        os.write(2, f"{type(error).__name__} (its traceback could not be printed)\n".encode())


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue

"""The harness of hidden tests: writes the hidden files next to a copy of the working folder and runs each case.

It runs in the sandbox, as a cell in a fresh process, and never imports the code under test. It uses only the standard
library and needs Python 3.9 or later.
"""

import base64
import ctypes
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

KEEP = 32 << 10
"""Maximum bytes of a case's output that are reported if the host does not compare the output."""
KEPT = 0.5
"""Fraction of the remaining time that a case leaves for the later cases, even if it hangs."""
LACKS = 3
"""Exit code of the process that looks for a module, if the module is missing."""
MAX_REPORT = 1 << 20
MODULES = (".py", ".pyc", ".so")
MAX_SAID = 1000 << 10
"""Maximum bytes of a case's report and output together, as sent to the host."""
MAX_ROUNDS = 1000
"""Maximum rounds of killing processes that fork; any that remain are killed when the cell ends."""
PR_SET_CHILD_SUBREAPER = 36


def verify(orders: dict[str, Any], hidden: Callable[[int], str], report: Callable[["str | None", Any], object]) -> None:
    """Run the cases in `orders`, which comes from the host, and report the outcome and output of each.

    All cases together may take `orders["seconds"]`. If `orders["copied"]` is true, the current folder is already a copy
    that no other process uses, and the cases run there. Otherwise they run in a new copy of the current folder.

    Args:
        orders: The plan of the tests.
        hidden: Host function that returns the hidden file of the given index, in base64.
        report: Host function that takes a case's name, or None if the test runner is missing, and the outcome.
    """
    deadline = time.monotonic() + orders["seconds"]
    if orders.get("words", [])[:2] == ["-m", "pytest"] and not has_module("pytest"):
        report(None, {"lacks": "pytest"})
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # Makes us the parent of processes that a case leaves.
    sys.pycache_prefix = None  # The cache is below our HOME, where a case could forge it.
    folder = tempfile.mkdtemp(prefix="verify-")
    try:
        work = own_copy(orders["copied"], folder)
        files = {path: base64.b64decode(hidden(index)) for index, path in enumerate(orders["files"])}
        if orders["sealed"]:
            place(f"/proc/self/fd/{orders['entrance']}", files)
            os.close(orders["entrance"])  # After this, no process can write the hidden files.
        names = orders["names"]
        for number, name in enumerate(names):
            seconds = limit_of(deadline - time.monotonic(), len(names) - 1 - number)
            said = run_case({**orders, "name": name}, work, files, folder, seconds)
            if len(json.dumps([name, said])) > MAX_SAID:
                printed, beside = (said.get(key, "")[:KEEP] for key in ("printed", "beside"))
                said = {"failed": "its report and output are too long", "printed": printed, "beside": beside}
            report(name, said)
    finally:
        kill_what_is_left(orders["copied"])
        shutil.rmtree(folder, ignore_errors=True)


def has_module(name: str) -> bool:
    """Return whether a module is installed, regardless of the files that the episode wrote.

    This is checked before any code under test runs. Otherwise that code could claim that the module is missing, and the
    episode would get no reward.
    """
    look = f"import sys\nfrom importlib.machinery import PathFinder\nis_there = PathFinder.find_spec({name!r})\n"
    code = f"{look}sys.exit(0 if is_there else {LACKS})"
    return subprocess.run([sys.executable, "-I", "-B", "-c", code], cwd="/", check=False).returncode != LACKS


def limit_of(left: float, behind: int) -> float:
    """Return the time limit of a case in seconds.

    It is the remaining time, minus a part for the `behind` cases that follow.
    """
    return left * (1 - KEPT) if behind else left


def own_copy(copied: bool, folder: str) -> str:
    """Return the folder in which the cases run: the current one if it is a copy, else a new copy below `folder`."""
    work = os.getcwd()
    if work == os.sep:
        raise FileNotFoundError("the working folder is gone")  # A process whose folder is gone starts at the root.
    if copied:
        drop_compiled(work)
        return work
    copy = os.path.join(folder, "work")
    copy_tree(work, copy, folder)
    return copy


def drop_compiled(folder: str) -> None:
    """Remove compiled Python files below a folder, whatever its folders' permissions, without following links."""
    left = [folder]
    while left:
        for entry in os.scandir(left.pop()):
            if entry.name == "__pycache__":
                remove(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                open_folder(entry.path)
                left.append(entry.path)


def copy_tree(source: str, target: str, without: str) -> None:
    """Copy files, folders and links, but not compiled Python, pipes, sockets, devices or unreadable files.

    `without` is the folder that contains the copy. It is skipped, because it may be inside the folder that is copied.
    """
    os.mkdir(target)
    for entry in os.scandir(source):
        path = os.path.join(target, entry.name)
        try:
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__" and not os.path.samefile(entry.path, without):
                    copy_tree(entry.path, path, without)
            elif entry.is_file(follow_symlinks=False):
                shutil.copyfile(entry.path, path, follow_symlinks=False)
                os.chmod(path, stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        except OSError:
            continue


def clear(folder: str, path: str) -> None:
    """Remove everything that is in the way of a hidden file or could shadow it, such as a package of the same name."""
    *parents, name = path.split("/")
    for parent in parents:
        folder = os.path.join(folder, parent)
        if os.path.islink(folder) or not os.path.isdir(folder):
            remove(folder)
            os.mkdir(folder)
        open_folder(folder)
    module = name[:-3] if name.endswith(".py") else ""
    for other in os.listdir(folder):
        stands_in = other == module or (other.startswith(module + ".") and other.endswith(MODULES))
        if other in (name, "__pycache__") or (module and stands_in):
            remove(os.path.join(folder, other))


def place(folder: str, files: Mapping[str, bytes]) -> None:
    """Write the hidden files below a folder, after removing everything in the way of any of them."""
    for path in files:
        clear(folder, path)
    for path, content in files.items():
        with open(os.path.join(folder, path), "xb") as file:
            file.write(content)


def open_folder(path: str) -> None:
    """Give ourselves all permissions on a folder that we own."""
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(path, mode | stat.S_IRWXU)


def remove(path: str) -> None:
    """Remove a file, a link or a folder if it exists, whatever the permissions are."""
    if os.path.isdir(path) and not os.path.islink(path):
        open_folder(path)
        for name in os.listdir(path):
            remove(os.path.join(path, name))
        os.rmdir(path)
    elif os.path.lexists(path):
        os.unlink(path)


def run_case(
    orders: dict[str, Any], work: str, files: Mapping[str, bytes], folder: str, seconds: float
) -> dict[str, Any]:
    """Run one case with its own hidden files and its own HOME, and return its report and output.

    Args:
        orders: The orders for this case.
        work: The folder in which the case runs: the copy of the working folder.
        files: The contents of the hidden files, keyed by path. They are written into `work`, too.
        folder: The folder below which a temporary folder for the case is created, which contains its HOME.
        seconds: Time limit of the case.
    """
    if seconds <= 0:
        return {"failed": "the time ran out before this case started"}
    for shared in (folder, work):
        open_folder(shared)  # An earlier case may have changed its mode.
    own = tempfile.mkdtemp(prefix="case-", dir=folder)
    home = os.path.join(own, "home")
    os.mkdir(home)
    place(work, files)  # Written again for each case, as an earlier one could have changed them.
    try:
        return run_process(orders, work, orders["sealed"] or own_hidden(own, files), home, seconds)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def own_hidden(own: str, files: Mapping[str, bytes]) -> str:
    """Create a folder with the hidden files for one case below the case's folder `own`, and return its path.

    Used in sandboxes where the hidden files can't be made read-only.
    """
    hidden = os.path.join(own, "hidden")
    os.mkdir(hidden)
    place(hidden, files)
    return hidden


def run_process(orders: dict[str, Any], work: str, hidden: str, home: str, seconds: float) -> dict[str, Any]:
    """Run one case in a separate process; return its report and output.

    Args:
        orders: The orders for this case.
        work: The current folder of the process.
        hidden: The folder that contains the hidden files.
        home: The process's HOME and folder for temporary files.
        seconds: Time limit of the case.
    """
    token = secrets.token_hex(16)
    shell = orders["kind"] == "shell"
    with ExitStack() as opened:
        given, said, printed, beside = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        if shell:
            told = orders["name"] if orders["compared"] else ""
        else:
            # Without the other cases, because the code under test can find everything that its process receives.
            own = {key: orders[key] for key in ("kind", "code", "words", "name", "files") if key in orders}
            told = json.dumps({**own, "folder": work, "hidden": hidden, "token": token, "report": said.fileno()})
        given.write(told.encode())
        given.seek(0)
        compared = shell and orders["compared"]
        process = subprocess.Popen(
            ["/bin/sh", "-c", orders["command"]] if shell else [sys.executable, "-I", "-B", "-c", orders["case"]],
            stdin=given,
            stdout=printed,
            stderr=beside if compared else printed,  # Only stdout is compared.
            cwd=work,
            env=environment(home),
            pass_fds=() if shell else (said.fileno(),),
            start_new_session=True,
        )
        heard: dict[str, Any] = {}
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            heard = {"failed": f"it took longer than {seconds:.1f} s"}
        finally:
            kill_what_is_left(orders["copied"])
        if not heard:
            heard = {"exit_code": code} if shell else report_of(text_of(said, MAX_REPORT), token, code)
        limit = MAX_REPORT if compared and "failed" not in heard else KEEP
        return {**heard, "printed": text_of(printed, limit), "beside": text_of(beside, KEEP)}


def environment(home: str) -> dict[str, str]:
    """Return our environment with another HOME and without our cache of compiled Python, which a case could forge."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    return {**kept, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}


def text_of(file: Any, limit: int) -> str:
    """Return the first `limit` bytes of a file as text, with a note of how many bytes were cut."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    text = str(file.read(limit).decode("utf-8", "replace"))
    return f"{text}\n[... {size - limit} bytes cut ...]\n" if size > limit else text


def report_of(text: str, token: str, code: int) -> dict[str, Any]:
    """Return the report of a case, or a failure if its process ended early or tampered with the report.

    Args:
        text: Everything that was written to the descriptor for the report.
        token: The secret with which a genuine report begins.
        code: Exit code of the process.
    """
    head, found, line = text.partition(token)
    if head or not found or not line.endswith("\n"):
        return {"failed": f"the process ended before its tests finished, with exit code {code}"}
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    return said if isinstance(said, dict) else {"failed": "the process overwrote the report of its tests"}


def kill_what_is_left(alone: bool) -> None:
    """Kill every process that a case left, and wait until all are gone.

    If we are `alone` with them, and our parent is the first process of a namespace, all are killed at once, so none can
    escape by forking. Otherwise they are killed one by one, and we become the parent of each one's children.
    """
    if alone and os.getppid() == 1:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return
    for _ in range(MAX_ROUNDS):
        left = list(children())
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(OSError):
                os.waitpid(pid, 0)


def children() -> Iterator[int]:
    """Yield the process ids of our children."""
    me = str(os.getpid())
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[1].decode() == me:
                yield int(name)

"""The harness of hidden tests: it lays the hidden files beside a copy of the working folder, and runs case by case.

It runs in the sandbox, as a cell in a fresh process, and never imports what it tests. Standard library only, Python 3.9
and later.
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
"""Bytes that are kept of what a case prints, where the host does not compare it."""
KEPT = 0.5
"""The part of the time that is left which a case that hangs leaves to all those behind it."""
LACKS = 3
"""The exit code of a process that does not find a module."""
MAX_REPORT = 1 << 20
MODULES = (".py", ".pyc", ".so")
MAX_SAID = 1000 << 10
"""Bytes of what a case says and prints together, on their way to the host."""
MAX_ROUNDS = 1000
"""How often processes that fork are killed, before the end of the cell ends them all."""
PR_SET_CHILD_SUBREAPER = 36


def verify(orders: dict[str, Any], hidden: Callable[[int], str], report: Callable[["str | None", Any], object]) -> None:
    """Run the cases of the orders within `seconds`, and report what each said and printed.

    Where `copied` says that the current folder is a copy already, in a place where nothing else runs, the cases run
    there; else in a copy of it.
    """
    deadline = time.monotonic() + orders["seconds"]
    if orders.get("words", [])[:2] == ["-m", "pytest"] and not has_module("pytest"):
        report(None, {"lacks": "pytest"})
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # What a case leaves behind becomes our child.
    sys.pycache_prefix = None  # Below our HOME, where a case could forge what is compiled.
    folder = tempfile.mkdtemp(prefix="verify-")
    try:
        work = own_copy(orders["copied"], folder)
        files = {path: base64.b64decode(hidden(index)) for index, path in enumerate(orders["files"])}
        if orders["sealed"]:
            place(f"/proc/self/fd/{orders['entrance']}", files)
            os.close(orders["entrance"])  # From here on nobody can write there.
        names = orders["names"]
        for number, name in enumerate(names):
            seconds = limit_of(deadline - time.monotonic(), len(names) - 1 - number)
            said = run_case({**orders, "name": name}, work, files, folder, seconds)
            if len(json.dumps([name, said])) > MAX_SAID:
                printed, beside = (said.get(key, "")[:KEEP] for key in ("printed", "beside"))
                said = {"failed": "it said or printed too much", "printed": printed, "beside": beside}
            report(name, said)
    finally:
        kill_what_is_left(orders["copied"])
        shutil.rmtree(folder, ignore_errors=True)


def has_module(name: str) -> bool:
    """Return whether a module is installed; what the episode wrote does not count, and cannot be in the way.

    It is found out before any code under test runs, which could else claim that it is not, and have no reward.
    """
    look = f"import sys\nfrom importlib.machinery import PathFinder\nis_there = PathFinder.find_spec({name!r})\n"
    code = f"{look}sys.exit(0 if is_there else {LACKS})"
    return subprocess.run([sys.executable, "-I", "-B", "-c", code], cwd="/", check=False).returncode != LACKS


def limit_of(left: float, behind: int) -> float:
    """Return the seconds of a case: what is left of the time of all, but for a part that the cases behind it keep."""
    return left * (1 - KEPT) if behind else left


def own_copy(copied: bool, folder: str) -> str:
    """Return the folder where the cases run: the current one where it is a copy, else a copy of it below `folder`."""
    work = os.getcwd()
    if work == os.sep:
        raise FileNotFoundError("the working folder is gone")  # And a process that begins there is at the root.
    if copied:
        drop_compiled(work)
        return work
    copy = os.path.join(folder, "work")
    copy_tree(work, copy, folder)
    return copy


def drop_compiled(folder: str) -> None:
    """Remove what Python compiled, whatever the modes of the folders are; no link is followed."""
    left = [folder]
    while left:
        for entry in os.scandir(left.pop()):
            if entry.name == "__pycache__":
                remove(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                open_folder(entry.path)
                left.append(entry.path)


def copy_tree(source: str, target: str, without: str) -> None:
    """Copy files, folders and links; compiled Python, pipes, sockets, devices and what cannot be read are left out.

    `without` is the folder of the copy, which may lie in the one that is copied.
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
    """Remove what is in the way of a hidden file, and what could stand in for it, such as a package of its name."""
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
    """Write the hidden files below a folder, once everything that is in the way of any of them is gone."""
    for path in files:
        clear(folder, path)
    for path, content in files.items():
        with open(os.path.join(folder, path), "xb") as file:
            file.write(content)


def open_folder(path: str) -> None:
    """Give us all rights to a folder of ours."""
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(path, mode | stat.S_IRWXU)


def remove(path: str) -> None:
    """Remove a file, a link or a folder, where there is one, whatever the modes are."""
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
    """Run one case with hidden files and a HOME of its own below `folder`; return what it said and what it printed."""
    if seconds <= 0:
        return {"failed": "the time was up before it began"}
    for shared in (folder, work):
        open_folder(shared)  # An earlier case may have closed it.
    own = tempfile.mkdtemp(prefix="case-", dir=folder)
    home = os.path.join(own, "home")
    os.mkdir(home)
    place(work, files)  # Anew for each case: the code of an earlier one could have changed them.
    try:
        return run_process(orders, work, orders["sealed"] or own_hidden(own, files), home, seconds)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def own_hidden(own: str, files: Mapping[str, bytes]) -> str:
    """Return a folder of a case's own with the hidden files, where none can be read-only for it."""
    hidden = os.path.join(own, "hidden")
    os.mkdir(hidden)
    place(hidden, files)
    return hidden


def run_process(orders: dict[str, Any], work: str, hidden: str, home: str, seconds: float) -> dict[str, Any]:
    """Run one case in a process of its own; return what it said and what it printed."""
    token = secrets.token_hex(16)
    shell = orders["kind"] == "shell"
    with ExitStack() as opened:
        given, said, printed, beside = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        if shell:
            told = orders["name"] if orders["compared"] else ""
        else:
            # Nothing of the other cases: the code under test can find in its process what this one is told.
            own = {key: orders[key] for key in ("kind", "code", "words", "name", "files") if key in orders}
            told = json.dumps({**own, "folder": work, "hidden": hidden, "token": token, "report": said.fileno()})
        given.write(told.encode())
        given.seek(0)
        compared = shell and orders["compared"]
        process = subprocess.Popen(
            ["/bin/sh", "-c", orders["command"]] if shell else [sys.executable, "-I", "-B", "-c", orders["case"]],
            stdin=given,
            stdout=printed,
            stderr=beside if compared else printed,  # What is compared is stdout alone.
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
    """Return our environment with another HOME, and without our cache of compiled Python, which a case could forge."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    return {**kept, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}


def text_of(file: Any, limit: int) -> str:
    """Return the first bytes of what was written to a file, and how many were cut."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    text = str(file.read(limit).decode("utf-8", "replace"))
    return f"{text}\n[... {size - limit} bytes cut ...]\n" if size > limit else text


def report_of(text: str, token: str, code: int) -> dict[str, Any]:
    """Return the report of a case that came to its end; a process that ended early has not passed."""
    head, found, line = text.partition(token)
    if head or not found or not line.endswith("\n"):
        return {"failed": f"the process ended before its tests did, with exit code {code}"}
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    return said if isinstance(said, dict) else {"failed": "the process wrote to the report of its tests"}


def kill_what_is_left(alone: bool) -> None:
    """Kill every process that a case left, and wait until they are gone.

    Where we are `alone` with them below the first process of a namespace, they are killed all at once, and none forks
    past it; else one after the other, and each one's own children become ours when it ends.
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
    """Yield our children."""
    me = str(os.getpid())
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[1].decode() == me:
                yield int(name)

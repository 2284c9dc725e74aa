"""The harness of hidden tests: it copies the working folder, adds the hidden files, and runs one case after the other.

It runs in the box, as a cell in a fresh process, and never imports what it tests. Standard library only, Python 3.9
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

KEEP = 32 << 10
"""Bytes that are kept of what a case prints."""
MAX_REPORT = 1 << 20
MAX_SAID = 1000 << 10
"""Bytes of what a case says and prints together, on their way to the host."""
MAX_ROUNDS = 1000
"""How often processes that fork are killed, before the end of the cell ends them all."""
PR_SET_CHILD_SUBREAPER = 36


def verify(orders: dict[str, Any], hidden: Callable[[int], str], report: Callable[[str, Any], object]) -> None:
    """Run the cases of the orders within `seconds`, and report what each said and printed."""
    deadline = time.monotonic() + orders["seconds"]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # What a case leaves behind becomes our child.
    folder = tempfile.mkdtemp(prefix="verify-")
    copy, home = os.path.join(folder, "work"), os.path.join(folder, "home")
    try:
        os.mkdir(home)
        copy_tree(orders.get("work") or os.getcwd(), copy, folder)
        for index, path in enumerate(orders["files"]):
            place(copy, path, base64.b64decode(hidden(index)))
        names = orders["names"]
        for number, name in enumerate(names):
            share = (deadline - time.monotonic()) / (len(names) - number)
            said = run_case({**orders, "name": name, "folder": copy}, home, share)
            if len(json.dumps([name, said])) > MAX_SAID:
                said = {"failed": "it said or printed too much", "printed": said.get("printed", "")[:KEEP]}
            report(name, said)
    finally:
        kill_children()
        shutil.rmtree(folder, ignore_errors=True)


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


def place(folder: str, path: str, content: bytes) -> None:
    """Write a hidden file; whatever could stand in for it, such as a package or a library of its name, is removed."""
    *parents, name = path.split("/")
    for parent in parents:
        folder = os.path.join(folder, parent)
        if os.path.islink(folder) or not os.path.isdir(folder):
            remove(folder)
            os.mkdir(folder)
    module = name[:-3] if name.endswith(".py") else ""
    for other in os.listdir(folder):
        if other == name or (module and (other == module or other.startswith(module + "."))):
            remove(os.path.join(folder, other))
    with open(os.path.join(folder, name), "xb") as file:
        file.write(content)


def remove(path: str) -> None:
    """Remove a file, a link or a folder, where there is one."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def run_case(orders: dict[str, Any], home: str, seconds: float) -> dict[str, Any]:
    """Run one case in a process of its own; return what it said and what it printed."""
    if seconds <= 0:
        return {"failed": "the time was up before it began"}
    token = secrets.token_hex(16)
    shell = orders["kind"] == "shell"
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as printed:
        told = (
            orders["stdin"][orders["name"]]
            if shell
            else json.dumps({**orders, "token": token, "report": said.fileno()})
        )
        given.write(told.encode("utf-8", "surrogatepass"))
        given.seek(0)
        process = subprocess.Popen(
            ["/bin/sh", "-c", orders["command"]] if shell else [sys.executable, "-I", "-B", "-c", orders["case"]],
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL if shell else printed,
            cwd=orders["folder"],
            env={**os.environ, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=() if shell else (said.fileno(),),
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {seconds:.1f} s", "printed": text_of(printed, KEEP)}
        finally:
            kill_children()
        if shell:
            return {"exit_code": code, "printed": text_of(printed, MAX_REPORT)}
        return {**report_of(text_of(said, MAX_REPORT), token, code), "printed": text_of(printed, KEEP)}


def text_of(file: Any, limit: int) -> str:
    """Return the first bytes of what was written to a file."""
    file.seek(0)
    return str(file.read(limit).decode("utf-8", "replace"))


def report_of(text: str, token: str, code: int) -> dict[str, Any]:
    """Return the report of a case that came to its end; a process that ended early has not passed."""
    head, found, line = text.partition(token)
    if head or not found or not line.endswith("\n"):
        return {"failed": f"the process ended before its tests did, with exit code {code}"}
    said: dict[str, Any] = json.loads(line)
    return said


def kill_children() -> None:
    """Kill every process that a case left; each one's own children become ours when it ends."""
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

"""The program of a child that runs a command: its arguments, folder, environment and input."""

from __future__ import annotations

import os

from .frames import write_fully
from .worker import own_folder

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NoReturn

SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


class Program:
    """A command as the host describes it; its text stays in the frame's body, which is zeroed after the fork."""

    def __init__(self, envelope: dict[str, Any], body: bytearray) -> None:
        view = memoryview(body)
        self.parts = [("shell", view)]
        """Kinds and contents: `shell` is a command for the shell; `word`, `env`, `cwd` and `stdin` give the rest."""
        if "parts" in envelope:
            self.parts, at = [], 0
            for kind, size in envelope["parts"]:
                self.parts.append((kind, view[at : at + size]))
                at += size

    def forget(self) -> None:
        """Zero the command's text, which must be a copy of a frame's body."""
        for _, part in self.parts:
            part[:] = bytes(len(part))

    def input(self) -> int | None:
        """Return an in-memory file with the whole input, to be closed after the fork, or None if there is none."""
        for kind, part in self.parts:
            if kind == "stdin":
                fd = os.memfd_create("stdin")
                write_fully(fd, [part], None)
                os.lseek(fd, 0, os.SEEK_SET)
                return fd
        return None

    def run(self, work: str) -> NoReturn:
        """Become the program, in its child; exit with 127 if it does not exist, or 126 if it can't start."""
        words: list[bytes] = []
        for kind, part in self.parts:
            if kind == "word":
                words.append(bytes(part))
            elif kind == "shell":
                words = [SHELL.encode(), b"-c", bytes(part)]
        become(words, work, self.parts)


def become(words: list[bytes], work: str, parts: Iterable[tuple[str, memoryview]]) -> NoReturn:
    """Replace this process with a program, in the folder and environment that `parts` give."""
    where, asked = "command", words[0]
    try:
        environment = {**os.environ, **own_folder(work)}
        for kind, part in parts:
            if kind == "cwd":
                where, asked = "cwd", bytes(part)
                os.chdir(asked)
                where, asked = "command", words[0]
            elif kind == "env":
                name, _, value = bytes(part).partition(b"=")
                environment[os.fsdecode(name)] = os.fsdecode(value)
        os.execvpe(words[0], words, environment)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        said = f"the command cannot start: {where}: {why}: {asked.decode('utf-8', 'replace')!r}\n"
        os.write(2, said.encode("utf-8", "replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)

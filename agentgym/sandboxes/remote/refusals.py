"""What a sandbox says against a call, as errors of the host."""

import errno
import os
import re
from collections.abc import Mapping
from typing import Any

from agentgym.errors import ClosedError, SandboxError, WireError
from agentgym.sandboxes.protocol.content import LateContent, NotAFile, WrongContent, of_number

NO_SPACE = os.strerror(errno.ENOSPC)
ROOM = "the sandbox's disk_mb is the room for the files of each folder"
OUT_OF_MEMORY = re.compile(r"\[oom after|: oom$|MemoryError|exit code -9\b")
"""How the server, a program and the kernel's signal say that memory was used up."""
MEMORY = "where memory was short: the sandbox's memory_mb is what its programs may use"
SANDBOX_LOST = "sandbox_lost"
"""The beginning of a SandboxError's text where an episode's sandbox is gone, or could not be started."""


FULL = (errno.ENOSPC, errno.EFBIG)
"""What a kernel says of a file that does not fit: into the folder, or, with bubblewrap, into the size of a file."""
MACHINE = (errno.ENFILE, errno.EIO)
"""What a kernel says if the machine itself has no open files left, or its disk fails: no code in a sandbox is behind
it."""


def with_advice(why: str) -> str:
    """Return why something failed in a sandbox, and behind it the setting of the sandbox that gives it more room."""
    if NO_SPACE in why and ROOM not in why:
        return f"{why} ({ROOM})"
    return f"{why} ({MEMORY})" if OUT_OF_MEMORY.search(why) else why


def raise_refusal(envelope: Mapping[str, Any], fields: Mapping[str, object]) -> None:
    """Raise what a sandbox says against a call, if it says anything: SandboxContentError, or ValueError for an
    argument.

    ClosedError for a branch that has ended, SandboxError for a fault of the machine, and WireError if what the sandbox
    says makes no sense.
    """
    if envelope.get("gone") is True:
        raise ClosedError("the branch was closed, or ended when its sandbox was reset")
    text, number = envelope.get("error"), envelope.get("errno")
    if text is None and number is None:
        return
    if type(text) is not str or not text or type(number) not in (int, type(None)):
        raise WireError(f"the sandbox gave an answer that makes no sense: error {text!r:.80}, errno {number!r:.80}")
    if type(number) is int:
        path = fields.get("path")
        if number in MACHINE:
            raise SandboxError(f"the machine of the sandbox could not do it: {text}")
        text += f" ({ROOM})" if number in FULL else ""
        raise of_number(number, path if isinstance(path, str) else None, text)
    if envelope.get("late") is True:
        raise LateContent(text)
    if envelope.get("argument") is True:
        raise ValueError(text)
    raise NotAFile(text) if envelope.get("not_a_file") is True else WrongContent(text)

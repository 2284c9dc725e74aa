"""Turns a sandbox's refusals of calls into errors on the host."""

import errno
import os
import re
from collections.abc import Mapping
from typing import Any

from agentgym.errors import ClosedError, SandboxError, WireError
from agentgym.sandboxes.protocol.content import LateContent, NotAFile, WrongContent, of_number

NO_SPACE = os.strerror(errno.ENOSPC)
ROOM = "raise the sandbox's disk_mb, the space for the files of each folder"
OUT_OF_MEMORY = re.compile(r"\[oom after|: oom$|MemoryError|exit code -9\b")
"""Matches the text with which the server, a program or the kernel's signal reports that memory ran out."""
MEMORY = "if memory ran out, raise the sandbox's memory_mb, which limits its programs"
SANDBOX_LOST = "sandbox_lost"
"""The beginning of a SandboxError's text if an episode's sandbox was lost or could not be started."""


FULL = (errno.ENOSPC, errno.EFBIG)
"""The kernel's error numbers for a file that does not fit into its folder, or exceeds bubblewrap's file size limit."""
MACHINE = (errno.ENFILE, errno.EIO)
"""The kernel's error numbers if the machine has no open files left or its disk fails.

No code in a sandbox can cause these errors.
"""


def with_advice(why: str) -> str:
    """Return why something failed in a sandbox, with advice to raise `disk_mb` or `memory_mb` if that may help."""
    if NO_SPACE in why and ROOM not in why:
        return f"{why} ({ROOM})"
    return f"{why} ({MEMORY})" if OUT_OF_MEMORY.search(why) else why


def raise_refusal(envelope: Mapping[str, Any], fields: Mapping[str, object]) -> None:
    """Raise the error that a sandbox's answer contains, if any.

    Args:
        envelope: The fields of the answer.
        fields: The fields of the call. If they contain a `path`, an error with an errno names it.

    Raises:
        SandboxContentError: If the sandbox refused the call.
        ValueError: If the sandbox refused an argument.
        ClosedError: If the branch has ended.
        SandboxError: If the sandbox's machine failed.
        WireError: If the answer is invalid.
    """
    if envelope.get("gone") is True:
        raise ClosedError("the branch was closed, or ended when its sandbox was reset")
    text, number = envelope.get("error"), envelope.get("errno")
    if text is None and number is None:
        return
    if type(text) is not str or not text or type(number) not in (int, type(None)):
        raise WireError(f"the sandbox sent an invalid answer: error {text!r:.80}, errno {number!r:.80}")
    if type(number) is int:
        path = fields.get("path")
        if number in MACHINE:
            raise SandboxError(f"the sandbox's host machine failed: {text}")
        text += f" ({ROOM})" if number in FULL else ""
        raise of_number(number, path if isinstance(path, str) else None, text)
    if envelope.get("late") is True:
        raise LateContent(text)
    if envelope.get("argument") is True:
        raise ValueError(text)
    raise NotAFile(text) if envelope.get("not_a_file") is True else WrongContent(text)

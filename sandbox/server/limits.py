"""Numbers of the protocol, limits, numbers of the kernel's calls, and the errors: what every other module may use."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__)) + "/"
"""Where the server's own files are: frames of theirs are not shown to the code in the sandbox."""
PACKAGE = __name__.partition(".")[0]
PROTOCOL = 2
MAX_ENVELOPE = 1 << 20
MAX_BODY = 18 << 20
"""The most that a call sends or answers is 16 MiB, and a command of 1 MiB."""
MAX_WORKER_ENVELOPE = 4096
MAX_ASK = 1 << 20
MAX_ASKS = 2000
"""The host refuses politely at half of this; a worker that asks on is not ours any more."""
MAX_OPEN_ASKS = 8
"""Questions that wait for their answer at once: more than one only where code was interrupted while it asked."""
KEEP = 32 << 10
"""Bytes of output kept from the head and from the tail, per stream, where a call does not say how many."""
WINDOW = 256 << 10
"""Bytes of a background program's stream that may be on their way to the host, or to the program."""
MAX_BACKGROUND = 64
"""Background programs and shells of one sandbox at once."""
CHUNK = 4 << 20
"""Bytes of a large file in one frame."""
MAX_TRANSFERS = 64
"""Large files of one sandbox that are on their way at once."""
HARD_OUTPUT = 16 << 20
MAX_PATH = 4096
"""Bytes of the longest path that a file call takes."""
GRACE_S = 0.3
SHELL_BEGINS_S = 5.0
FORK_S = 5.0
MAX_BRANCHES = 64
MAX_DEPTH = 100
"""How deep a working folder may be to be copied into a branch."""
TRUNK = 0
REMOVE_S = 5.0
"""How long files that code left are removed where the call sets no limit, or has used it up."""
LONGEST_POLL_MS = 1 << 30
"""A poll takes no more milliseconds than a C int holds."""
KILL_S = 1.0
"""How long one process after the other is killed; whoever forks faster is met by killing all at once."""
PATIENCE_S = 0.5
"""How long a worker may take over one frame."""
AHEAD = 16 << 10
"""Bytes that are read ahead of the frame that is taken."""
ZEROS = bytes(KEEP)
SCRATCH = memoryview(bytearray(KEEP))
"""What every read of a pipe goes through; zeroed after each."""
CREDENTIALS = socket.CMSG_SPACE(12)
"""Room for the process, user and group that wrote; or for three descriptors."""
OUTPUT_LATER_S = 0.002
"""How long a call's output may lie in its pipe: most calls have ended by then, and wake the supervisor once."""
CHANNEL = 3
"""The worker's end of its channel."""
WIRE_IN, WIRE_OUT = 3, 4
"""Where the supervisor holds the host's wire, whatever number the client had for it."""
HIGHEST_FD = (1 << 32) - 1
SYS_CLOSE_RANGE = 436
"""The same number on every architecture."""
CHANNEL_LOST = 70
"""The exit code of a worker that cannot answer any more."""
RESET = 75
"""The exit code of a supervisor whose episode has ended: another one answers the host's reset."""
SANDBOX_KILLED = 86
"""The exit code of a server that died of what the code in its sandbox did; the host knows it too."""
PROC = 5
"""Where the supervisor holds the kernel's view of its own process namespace; `/proc` itself may show the code's."""
LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
ALONE = os.getpid() == 1
"""In a process namespace of our own; only then may every process be signaled."""
IPC_RMID = 0
MAX_IPC = 65_536
"""How many System V objects of a kind are looked for where not even one more can be made."""
LIMITS = 16
"""How many limits the kernel has for a process."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_GET_TID_ADDRESS = 1, 4, 36, 40
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SYS_MQ_OPEN = {"x86_64": 240, "aarch64": 180}.get(os.uname().machine, 0xFFFFFFFF)
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
LENGTH = struct.Struct(">I")
CREDENTIAL = struct.Struct("3i")
libc = ctypes.CDLL(None, use_errno=True)
decode = json.JSONDecoder().raw_decode  # What json.loads does around it takes longer than it does.


def json_encoder() -> Callable[[Any], str]:
    """What json.dumps does, without what that makes anew in each call, which takes as long as the rest."""
    plain = json.JSONEncoder(check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    pieces = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True)
    return lambda value: "".join(pieces(value, 0))


encode = json_encoder()


class Broken(Exception):
    """The other end sent what the protocol does not allow."""


class Refused(Exception):
    """What is in the sandbox, or a path in it, is not what a call can take; the text goes to the host."""


class WrongArgument(Refused):
    """What no sandbox would do, whatever code has left in it: it is the caller's mistake."""


class NotAFile(Refused):
    """A link, a pipe, a socket or a device."""

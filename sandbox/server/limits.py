"""Protocol numbers, limits, system call numbers, and errors: everything that all other modules may use."""

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
"""The folder of the server's files; tracebacks for the code in the sandbox leave out frames from there."""
PACKAGE = __name__.partition(".")[0]
PROTOCOL = 2
MAX_ENVELOPE = 1 << 20
MAX_BODY = 18 << 20
"""Maximum bytes of a body: a call sends or returns at most 16 MiB, plus a command of 1 MiB."""
MAX_WORKER_ENVELOPE = 4096
MAX_ASK = 1 << 20
MAX_ASKS = 2000
"""Maximum host function calls of a cell.

The host refuses calls after half as many. A worker that keeps calling despite that is no longer controlled by us.
"""
MAX_OPEN_ASKS = 8
"""Maximum host function calls that wait for answers; there is more than one only if code was interrupted in a call."""
KEEP = 32 << 10
"""Maximum bytes that are stored of the head of each stream, and of its tail, unless a call sets another number."""
WINDOW = 256 << 10
"""Maximum number of bytes of a background program's stream in transit to the host or to the program."""
MAX_BACKGROUND = 64
"""Maximum number of background programs and shells in a sandbox."""
CHUNK = 4 << 20
"""Bytes of a large file in one frame."""
MAX_TRANSFERS = 64
"""Maximum number of large file transfers at once in a sandbox."""
HARD_OUTPUT = 16 << 20
MAX_PATH = 4096
"""Maximum bytes of a path in a file call."""
GRACE_S = 0.3
SHELL_BEGINS_S = 5.0
FORK_S = 5.0
MAX_BRANCHES = 64
MAX_DEPTH = 100
"""Maximum folder depth of a working folder that is copied into a branch."""
TRUNK = 0
REMOVE_S = 5.0
"""Seconds for removing files that code left, if the call sets no limit or has used it up."""
LONGEST_POLL_MS = 1 << 30
"""Longest timeout of a poll in milliseconds, because it must fit in a C int."""
KILL_S = 1.0
"""Seconds for which processes are killed one by one; any that fork faster are then killed all at once."""
PATIENCE_S = 0.5
"""Seconds that a worker may take for one frame."""
AHEAD = 16 << 10
"""Maximum bytes that are read ahead of the current frame."""
ZEROS = bytes(KEEP)
SCRATCH = memoryview(bytearray(KEEP))
"""The buffer for every read from a pipe, zeroed after each read."""
CREDENTIALS = socket.CMSG_SPACE(12)
"""Bytes of space for the ids of the writer's process, user and group, or for three descriptors."""
OUTPUT_LATER_S = 0.002
"""Seconds that a call's output may stay in its pipe: most calls end sooner, and so wake the supervisor only once."""
CHANNEL = 3
"""The worker's descriptor of its channel to the supervisor."""
WIRE_IN, WIRE_OUT = 3, 4
"""The supervisor's descriptors of the host's connection, whatever number the client had for it."""
HIGHEST_FD = (1 << 32) - 1
SYS_CLOSE_RANGE = 436
"""Number of the system call close_range, which is the same on every architecture."""
CHANNEL_LOST = 70
"""Exit code of a worker that can't answer any more."""
RESET = 75
"""Exit code of a supervisor whose episode has ended; another supervisor answers the host's reset."""
SANDBOX_KILLED = 86
"""Exit code of a server that died because of code in its sandbox; the host uses the same number."""
PROC = 5
"""The supervisor's descriptor of a /proc that shows its own process namespace; `/proc` may show the code's."""
LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
ALONE = os.getpid() == 1
"""Whether we are the first process of a namespace; only then may we signal all processes at once."""
IPC_RMID = 0
MAX_IPC = 65_536
"""Number of System V objects of a kind that are tried if not even one more can be created."""
LIMITS = 16
"""Number of resource limits that the kernel has for a process."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_GET_TID_ADDRESS = 1, 4, 36, 40
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SYS_MQ_OPEN = {"x86_64": 240, "aarch64": 180}.get(os.uname().machine, 0xFFFFFFFF)
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
LENGTH = struct.Struct(">I")
CREDENTIAL = struct.Struct("3i")
libc = ctypes.CDLL(None, use_errno=True)
decode = json.JSONDecoder().raw_decode  # The wrapper json.loads takes longer than this.


def json_encoder() -> Callable[[Any], str]:
    """Return json.dumps without the setup that it repeats in each call, which takes as long as the rest."""
    plain = json.JSONEncoder(check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    pieces = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True)
    return lambda value: "".join(pieces(value, 0))


encode = json_encoder()


class Broken(Exception):
    """The other end violated the protocol."""


class Refused(Exception):
    """A path or content in the sandbox does not suit the call; the text goes to the host."""


class WrongArgument(Refused):
    """A mistake of the caller: no sandbox would accept this, whatever code has left in it."""


class NotAFile(Refused):
    """The path is that of a link, a pipe, a socket or a device."""

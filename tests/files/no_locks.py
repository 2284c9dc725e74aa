"""A process that can lock no file: the kernel refuses flock and fcntl locks through seccomp.

Run as `python -m tests.files.no_locks FOLDER ERRNO`: it holds the folder, writes and reads a store there, prints
"held", and waits for the end of stdin.
"""

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

CALLS = {"x86_64": (73, 72), "aarch64": (32, 25)}
"""The system call numbers of flock and fcntl, by machine."""
LOCKS = (5, 6, 7, 36, 37, 38)
"""The fcntl commands that query, set or wait for locks."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse_locks(errno: int) -> None:
    """Make flock and fcntl locks fail in this process from here on."""
    flock, fcntl = CALLS[platform.machine()]
    code = [
        (_LOAD, 0, 0, 0),  # the system call number
        (_EQUAL, len(LOCKS) + 3, 0, flock),
        (_EQUAL, 0, len(LOCKS) + 1, fcntl),
        (_LOAD, 0, 0, 24),  # its second argument
        *((_EQUAL, len(LOCKS) - place, 0, command) for place, command in enumerate(LOCKS)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno),
    ]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(packed)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS failed, without which there are no filters"
    assert prctl(22, 2, ctypes.byref(program), 0, 0) == 0, "seccomp"


def main() -> None:
    """Hold the folder, write, read, and wait."""
    import fcntl

    from agentgym.files.file_systems import has_locks
    from agentgym.files.folder_lock import FolderInUse, hold_folder
    from agentgym.store.reader import RolloutStore
    from agentgym.store.writer import RolloutWriter
    from tests.store.test_store import group, rollout

    folder = Path(sys.argv[1])
    refuse_locks(int(sys.argv[2]))
    for lock in (fcntl.flock, fcntl.lockf):
        assert not has_locks(folder, lock)
    try:
        with hold_folder(folder):
            with RolloutWriter(folder, done=99) as writer:
                writer.add([group(rollout(f"{os.getpid()}/0"))], step=0)
            with RolloutStore(folder) as store:
                sys.stdout.write(f"held, lost {writer.lost}, stored {len(list(store.find()))}\n")
            sys.stdout.flush()
            sys.stdin.read()
    except FolderInUse as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()

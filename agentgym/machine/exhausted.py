"""What the machine has run out of: threads and processes, or descriptors of files."""

import errno
import os
import threading

_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def exhausted(error: BaseException) -> str | None:
    """Say what the machine has no more of, where an error is of that and agentgym gets none either; else None.

    An error alone does not tell whose it is: code that opens as many files as a model asked for meets the limit by
    itself, and has given them back by the time of this look. Memory and room on a disk are not among it: how much of
    them a tool takes is what its arguments ask for.
    """
    if _is_of_threads(error) and not _can_start_a_thread():
        return "no thread or process can be started"
    if isinstance(error, OSError) and error.errno in _DESCRIPTORS and not _can_open_a_file():
        return "no more files can be opened"
    return None


def _is_of_threads(error: BaseException) -> bool:
    """Whether it is of the start of a thread or of a process; both count against one limit."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def _can_start_a_thread() -> bool:
    thread = threading.Thread(target=int, name="agentgym-probe", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


def _can_open_a_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True

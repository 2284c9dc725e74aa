"""Detection of resources that the machine has run out of: threads and processes, or file descriptors."""

import errno
import os
import threading

_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def exhausted(error: BaseException) -> str | None:
    """Return the resource that the machine has run out of, if its lack caused the error and still lasts.

    To find out whether it lasts, this tries to start a thread or to open a file. The error alone doesn't tell whose
    fault it is: code that opens as many files as a model asked for reaches the limit by itself, and has closed them
    again by the time of this check. Memory and disk space are not checked, because a tool uses as much of them as its
    arguments ask for.

    Returns:
        A phrase for the message, or None if the error has another reason.
    """
    if _is_of_threads(error) and not _can_start_a_thread():
        return "no thread or process can be started"
    if isinstance(error, OSError) and error.errno in _DESCRIPTORS and not _can_open_a_file():
        return "no more files can be opened"
    return None


def _is_of_threads(error: BaseException) -> bool:
    """Return whether a thread or a process couldn't be started; both count against the same limit."""
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

"""Runs a command until stdin is closed, then terminates the command and every process that it started.

Run it as `python -I -S supervise.py GRACE_S COMMAND...`, as a session leader. It is a script, so it imports only the
standard library. The parent holds the other end of stdin, so stdin is closed no matter how the parent ends, even by
SIGKILL.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from functools import partial

_PR_SET_PDEATHSIG = 1


def main(grace_s: float, command: list[str]) -> None:
    """Run the command. This never returns, because it kills its own process group at the end.

    When the command is terminated, it has `grace_s` seconds to exit; then its whole process group is killed.
    """
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=partial(die_with, os.getpid()))
    except OSError as error:
        sys.exit(f"[cannot run {command[0]}: {error.strerror}]")
    with child:
        threading.Thread(target=_end_at_the_end_of_stdin, args=(child, grace_s), daemon=True).start()
        code = child.wait()
    print(f"[ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}]", flush=True)  # noqa: T201
    os.killpg(0, signal.SIGKILL)


def _end_at_the_end_of_stdin(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    sys.stdin.buffer.read()
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


def die_with(supervisor: int) -> None:
    """Have the kernel kill this process when its parent, the supervisor, ends.

    If the supervisor has already ended, kill this process now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])

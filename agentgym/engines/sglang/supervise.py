"""Run a command for as long as somebody holds the other end of stdin, then end it and all that it started.

`python -I -S supervise.py GRACE_S COMMAND...`, as the leader of a session; a script, so standard library only. However
its parent ends, also by SIGKILL, stdin comes to its end.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main(grace_s: float, command: list[str]) -> None:
    """Does not return: the last thing it does is to kill its own process group.

    `grace_s` is for the command to end by itself when it is told to; then its whole process group is killed.
    """
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_keeper)
    except OSError as error:
        sys.exit(f"[cannot run {command[0]}: {error.strerror}]")
    with child:
        threading.Thread(target=_end_when_nobody_holds_on, args=(child, grace_s), daemon=True).start()
        code = child.wait()
    print(f"[ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}]", flush=True)  # noqa: T201
    os.killpg(0, signal.SIGKILL)


def _end_when_nobody_holds_on(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    sys.stdin.buffer.read()
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


def _die_with_the_keeper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])

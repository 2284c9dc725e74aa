"""Run a command for as long as somebody holds the other end of stdin, then end it and all that it started.

`python -I -S keeper.py COMMAND...`, as the leader of a session; a script, so standard library only. However
its parent ends, also by SIGKILL, stdin comes to its end.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 5.0
"""For the command to end by itself; then its whole process group is killed."""
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    """Does not return: the last thing it does is to kill its own process group."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_keeper) as child:
        threading.Thread(target=_end_when_nobody_holds_on, args=(child,), daemon=True).start()
        code = child.wait()
    print(f"[ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}]", flush=True)  # noqa: T201
    os.killpg(0, signal.SIGKILL)


def _end_when_nobody_holds_on(child: "subprocess.Popen[bytes]") -> None:
    sys.stdin.buffer.read()
    child.terminate()
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


def _die_with_the_keeper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A program of its own, `python tied.py COMMAND...`: it runs a command that ends with the client that asked for it.

The client holds the other end of this program's input, which the kernel closes however the client dies. It needs
nothing but the standard library.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def end(group: int) -> None:
    """Kill all processes of the command."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_with_input(group: int) -> None:
    """Kill all processes of the command when the input ends."""
    while os.read(0, 1):
        pass
    end(group)


def main(command: list[str]) -> int:
    """Return the command's exit code, or 130 where Ctrl-C ended it; nothing of it is left."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_input, args=(process.pid,), daemon=True).start()
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        end(process.pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

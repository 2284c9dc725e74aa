"""A standalone program, `python tied.py COMMAND...`, that runs a command and kills it when the program's client dies.

The client is the process that started the program and holds the other end of its input. The kernel closes that end,
however the client dies. The program uses only the standard library.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def end(group: int) -> None:
    """Kill all processes of the command, given its process group."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_with_input(group: int) -> None:
    """Kill all processes of the command, given its process group, once this program's standard input ends."""
    while os.read(0, 1):
        pass
    end(group)


def main(command: list[str]) -> int:
    """Run the command and return its exit code, or 130 after Ctrl-C, and kill all of its remaining processes."""
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

"""A standalone program that removes the containers of a Docker engine's client when the client dies.

It is started as `python watchman.py PIDFD SOCKET TOKEN`, with a pidfd of the client's process or -1, the path of the
engine's socket, and the client's token. It waits until the client's process ends or this program's standard input is
closed, whichever comes first. A byte on the standard input means that the client has removed everything itself. The
program uses only the standard library, and always terminates.
"""

import http.client
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any
from urllib.parse import quote, urlencode

PATIENCE_S = 60.0
"""Seconds to keep trying an engine that does not answer; after that, the next client removes the leftovers."""
LATE_S = 2.0
"""Seconds between two removals. A second one is needed if the engine was creating a container when its client died."""
TIMEOUT_S = 30.0
PAUSE_S = 0.5
RUN_LABEL = "agentgym.run"


class Connection(http.client.HTTPConnection):
    """A connection to an engine's unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self.path)


def ask(path: str, method: str, target: str) -> Any:
    """Send a request to the engine, and return the JSON of the response to a GET, or None for other methods.

    A status of 404 or 409 is not an error: the object is gone, or is already being removed.

    Args:
        path: The path of the engine's socket.
        method: The HTTP method.
        target: The path and query of the request.

    Raises:
        OSError: If the engine doesn't answer, or refuses.
        ValueError: If the response is not JSON.
    """
    connection = Connection(path)
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status >= 400 and answer.status not in (404, 409):
            raise OSError(f"{answer.status}: {body[:200]!r}")
        return json.loads(body) if body and method == "GET" else None
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def remove_all(path: str, token: str) -> None:
    """Remove the client's containers and its heartbeat.

    Args:
        path: The path of the engine's socket.
        token: The client's token, with which its containers and its heartbeat are labeled.

    Raises:
        OSError: If the engine doesn't answer, or refuses.
        ValueError: If a response is not JSON.
    """
    mine = urlencode({"filters": json.dumps({"label": [f"{RUN_LABEL}={token}"]})})
    for container in ask(path, "GET", f"/containers/json?all=1&{mine}"):
        ask(path, "DELETE", f"/containers/{quote(container['Id'])}?force=1&v=1")
    for volume in ask(path, "GET", f"/volumes?{mine}")["Volumes"] or ():
        ask(path, "DELETE", f"/volumes/{quote(volume['Name'])}")


def client_died(process: int) -> bool:
    """Wait until the client ends and return whether it left its containers to this program.

    `process` is a pidfd of the client, or -1 to watch only the standard input.
    """
    poller = select.poll()
    poller.register(0, select.POLLIN)
    if process >= 0:
        poller.register(process, select.POLLIN)
    ready = dict(poller.poll())
    return 0 not in ready or os.read(0, 1) == b""


def main(process: int, path: str, token: str) -> None:
    """Wait until the client ends and remove its leftovers, retrying while the engine does not answer.

    Args:
        process: A pidfd of the client's process, or -1.
        path: The path of the engine's socket.
        token: The client's token.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not client_died(process):
        return
    end, looks = time.monotonic() + PATIENCE_S, 0
    while looks < 2 and time.monotonic() < end:
        try:
            remove_all(path, token)
            looks += 1
            time.sleep(LATE_S if looks < 2 else 0)
        except (OSError, ValueError):
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

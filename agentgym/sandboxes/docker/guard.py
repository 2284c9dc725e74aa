"""The guard of a Docker client's services: removes them when the client dies, and reports services that end."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from agentgym.sandboxes.docker.heartbeat import RUN_LABEL
from agentgym.sandboxes.network.services import LABEL

WATCHMAN = Path(__file__).with_name("watchman.py")
PAUSE_S = 0.5
LONGEST_EVENT = 1 << 20
_log = logging.getLogger("agentgym.sandboxes")


class Guard:
    """Watches the services that one client of a Docker engine on this machine has started.

    A sandbox ends when its connection closes, but a service has no connection. So a separate process, which Ctrl-C in
    the client's terminal doesn't reach, removes everything that is labeled with the client's token. It does so as soon
    as the client is gone, however the client ended.
    """

    def __init__(self, host: str, token: str) -> None:
        self._socket, self._token = urlsplit(host).path, token
        self._watchman: subprocess.Popen[bytes] | None = None
        self._listening: asyncio.Task[None] | None = None
        self.heard: dict[str, Callable[[int], Awaitable[None]]] = {}
        """Callbacks for when a container ends, keyed by its id; each gets the exit code."""

    def start(self) -> None:
        """Start the separate process and the event listener; a second call does nothing."""
        if self._watchman is None:
            self._watchman = _watchman(self._socket, self._token)
            self._listening = asyncio.create_task(self._listen())

    async def stop(self) -> None:
        """Stop the separate process and the listener, once the client has removed its containers itself."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})
        if self._watchman is not None:
            assert self._watchman.stdin is not None
            with suppress(BrokenPipeError), self._watchman.stdin as pipe:
                pipe.write(b"x")
            await asyncio.to_thread(self._watchman.wait)

    async def _listen(self) -> None:
        """Call the callback of each container that ends; if the engine closes the stream, reconnect and catch up."""
        since = int(time.time())
        while True:
            try:
                async for event in _events(self._socket, self._token, since):
                    since = event["time"]
                    ended = event["Actor"]
                    tell = self.heard.pop(ended["ID"], None)
                    if tell is not None:
                        await tell(int(ended["Attributes"]["exitCode"]))
            except (OSError, ValueError, KeyError) as error:
                _log.debug("the engine's event stream ended: %s", error)
            await asyncio.sleep(PAUSE_S)


def _watchman(path: str, token: str) -> "subprocess.Popen[bytes]":
    try:
        process = os.pidfd_open(os.getpid())
    except OSError:  # The watchman then watches only its input, which forked children may keep open.
        process = -1
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(WATCHMAN), str(process), path, token],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
            pass_fds=[process] if process >= 0 else [],
        )
    finally:
        if process >= 0:
            os.close(process)


async def _events(path: str, token: str, since: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the Docker engine's event for each of the client's services that ends, from the time `since` on.

    Raises:
        OSError: If the engine doesn't answer, refuses the stream, or closes the connection before its response begins.
        ValueError: If an event is not JSON, for example because the stream ends in the middle of it.
    """
    asked = {"type": ["container"], "event": ["die"], "label": [f"{RUN_LABEL}={token}", LABEL]}
    query = {"filters": json.dumps(asked), "since": since}
    reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST_EVENT)
    try:
        # With HTTP/1.0, the response is not chunked and ends with the connection.
        writer.write(f"GET /events?{urlencode(query)} HTTP/1.0\r\nHost: engine\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if head.split()[1:2] != [b"200"]:
            raise OSError(head.decode(errors="replace").partition("\r\n")[0])
        while line := await reader.readline():
            if line.strip():
                yield json.loads(line)
    except asyncio.IncompleteReadError as error:
        raise OSError("the engine closed the connection before its response began") from error
    finally:
        writer.transport.abort()

"""A server process that is ours: launched, watched while it starts, and never left behind."""

import asyncio
import os
import shutil
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from agentgym.engines.sglang.http import JsonClient
from agentgym.errors import EngineError

Progress = Callable[[str], None]
"""Told in a few words what a server is doing while it starts."""

_POLL_S = 0.25
_GRACE_S = 10.0
"""For a server to end by itself when it is told to: SGLang looks every 5 s, and then tidies up."""
NOT_SGLANG = "has no /ready: it is no SGLang server, or an older one than 0.5.23; install that or a newer one"
_LAST_WORDS = 20
"""Lines of a server's log that an error quotes."""
_SUPERVISE = Path(__file__).with_name("supervise.py")


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """One command and all that it starts: ended when this is closed, and when our process ends in whatever way."""

    def __init__(self, command: Sequence[str], log: Path, *, grace_s: float = _GRACE_S) -> None:
        self.command, self.log, self._grace_s = tuple(command), log, grace_s
        self._keeper: asyncio.subprocess.Process | None = None

    @property
    def ended(self) -> bool:
        """Whether it ran once and does not run any more."""
        return self._keeper is not None and self._keeper.returncode is not None

    @property
    def pid(self) -> int | None:
        """Of the session that the server and its children run in; None where nothing runs."""
        running = self._keeper is not None and self._keeper.returncode is None
        return self._keeper.pid if running and self._keeper is not None else None

    async def start(self) -> None:
        """Start the command; EngineError where there is no such program."""
        if shutil.which(self.command[0]) is None:
            raise EngineError(f"command: there is no program {self.command[0]!r} to launch a server with")
        with self.log.open("wb") as log:
            self._keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SUPERVISE), str(self._grace_s), *self.command),
                stdin=PIPE,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )

    async def ready(self, client: JsonClient, *, startup_s: float, progress: Progress | None) -> None:
        """Wait until it answers that it is ready; EngineError, with its last words, where it ends or takes too long."""
        try:
            async with asyncio.timeout(startup_s):
                while not await self._is_ready(client):
                    if progress is not None and (said := self.last_words(1)):
                        progress(said)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineError(f"the server was not ready after {startup_s:g} s: {self.last_words()}") from None

    async def _is_ready(self, client: JsonClient) -> bool:
        if self.pid is None:
            raise EngineError(f"the server ended while it started: {self._why()}")
        with suppress(ConnectionError):
            status = (await client.get("/ready", timeout_s=5.0)).status
            if status == 404:
                raise EngineError(f"the server {NOT_SGLANG}")
            return status == 200
        return False

    def _why(self) -> str:
        words = self.last_words()
        if "No module named 'sglang" in words or "No module named sglang" in words:
            return f"{self.command[0]} has no SGLang: name a Python that has it in AGENTGYM_SGLANG; see docs/engines.md"
        return words

    def last_words(self, lines: int = _LAST_WORDS) -> str:
        """The end of its log."""
        with suppress(OSError):
            said = self.log.read_bytes()[-(1 << 14) :].decode(errors="replace").splitlines()
            return "\n".join([line for line in said if line.strip()][-lines:])
        return ""

    async def close(self) -> None:
        """End it and all that it started; it may be called twice."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None
        keeper.stdin.close()  # the keeper's sign to end what it keeps, and itself
        await asyncio.shield(keeper.wait())

"""Launched server processes: each is watched while it starts and ended when its owner ends."""

import asyncio
import os
import shutil
import socket
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from agentgym.engines.sglang.http import JsonClient
from agentgym.errors import EngineError

Progress = Callable[[str], None]
"""A function that is called with a short text on what a server is doing while it starts."""

_POLL_S = 0.25
_GRACE_S = 10.0
"""Seconds for a server to end by itself before it is killed: SGLang looks for a signal every 5 s, then cleans up."""
NOT_SGLANG = "has no /ready: it is no SGLang server, or an older one than 0.5.23; install that or a newer one"
_LOG_TAIL = 20
"""Lines at the end of a server's log that an error quotes."""
_SUPERVISE = Path(__file__).with_name("supervise.py")
_TORCHRUNS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
"""Variables by which torchrun tells a process its place among those that train, beside TORCHELASTIC_*: a server that
finds them waits for a group that is not its own."""


def server_environment(gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a launched server: this process's, without torchrun's, with these GPUs alone if any."""
    kept = {name: value for name, value in os.environ.items() if not _is_torchruns(name)}
    return kept | {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def _is_torchruns(name: str) -> bool:
    return name in _TORCHRUNS or name.startswith("TORCHELASTIC_")


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """One command and all processes that it starts: ended by `close`, and when this Python process ends in any way."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        gpus: Sequence[str] = (),
        restarts: int = 0,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.command, self.log, self.gpus, self._grace_s = tuple(command), log, tuple(gpus), grace_s
        self.restarts_left = restarts
        """Times that the command may be started again after it ended."""
        self._supervisor: asyncio.subprocess.Process | None = None

    @property
    def ended(self) -> bool:
        """Whether the command was started and has ended."""
        return self._supervisor is not None and self._supervisor.returncode is not None

    @property
    def pid(self) -> int | None:
        """The id of the session that the server and its children run in; None where nothing runs."""
        running = self._supervisor is not None and self._supervisor.returncode is None
        return self._supervisor.pid if running and self._supervisor is not None else None

    async def start(self) -> None:
        """Start the command; EngineError where its program is not installed."""
        if shutil.which(self.command[0]) is None:
            raise EngineError(f"command: there is no program {self.command[0]!r} to launch a server with")
        with self.log.open("ab") as log:
            self._supervisor = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SUPERVISE), str(self._grace_s), *self.command),
                stdin=PIPE,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                env=server_environment(self.gpus),
            )

    async def restart(self) -> None:
        """Start the command again after it ended; its log goes on behind what it said before."""
        self.restarts_left -= 1
        await self.close()
        await self.start()

    async def ready(self, client: JsonClient, *, startup_s: float, progress: Progress | None) -> None:
        """Wait until the server is ready; EngineError with the end of its log where it ends or takes too long.

        `progress` is told each new last line of the log, with the seconds that have passed and the most that there are.
        """
        began, last = time.monotonic(), ""
        try:
            async with asyncio.timeout(startup_s):
                while not await self._is_ready(client):
                    if progress is not None and (said := self.log_tail(1)) and said != last:
                        progress(f"{time.monotonic() - began:.0f} s of at most {startup_s:.0f} s: {said}")
                        last = said
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            late = f"startup_s: the server was not ready after {startup_s:g} s"
            raise EngineError(f"{late}; its log ends: {self.log_tail()}") from None

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
        tail = self.log_tail()
        if "No module named 'sglang" in tail or "No module named sglang" in tail:
            return (
                f"{self.command[0]} has no SGLang: name a Python that has it in AGENTGYM_SGLANG; see docs/sglang.md of "
                "a checkout"
            )
        return tail

    def log_tail(self, lines: int = _LOG_TAIL) -> str:
        """The last lines of the server's log that are not empty."""
        with suppress(OSError):
            said = self.log.read_bytes()[-(1 << 14) :].decode(errors="replace").splitlines()
            return "\n".join([line for line in said if line.strip()][-lines:])
        return ""

    async def close(self) -> None:
        """End the command and all that it started; closing twice is harmless."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        supervisor.stdin.close()  # it then ends the server and itself
        await asyncio.shield(supervisor.wait())

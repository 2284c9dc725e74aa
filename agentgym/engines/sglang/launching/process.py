"""Processes of launched servers. They are watched during startup, and terminated with the process that owns them."""

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
"""A function that is called with short messages about the startup of a server."""

_POLL_S = 0.25
_GRACE_S = 10.0
"""Seconds for a server to exit before it is killed. SGLang checks for a signal every 5 s, then cleans up."""
NOT_SGLANG = (
    "has neither /ready nor /health_generate: it is not an SGLang server, or is older than 0.5.16; install SGLang "
    "0.5.16 or newer"
)
_SAMPLED_S = 30.0
"""Timeout, in seconds, of a health check that samples an id, to which a server takes up to 20 s to respond."""
_LOG_TAIL = 20
"""Number of lines from the end of a server's log that an error quotes."""
_SUPERVISE = Path(__file__).with_name("supervise.py")
_TORCHRUNS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
"""Variables, besides TORCHELASTIC_*, in which torchrun tells a training process its rank. A server that inherited
them would wait for the trainers' process group.
"""


async def readiness(client: JsonClient, timeout_s: float) -> int:
    """Return the HTTP status of a server's readiness: 200 if it accepts requests and isn't paused.

    It is that of /ready. SGLang before 0.5.20 has none; for such a server it is that of /health_generate, which samples
    an id. It is 404 if there is neither.

    Args:
        client: A client of the server.
        timeout_s: Timeout of the response from /ready.

    Raises:
        ConnectionError: If there is no response.
        WireError: If the response is invalid.
    """
    status = (await client.get("/ready", timeout_s=timeout_s)).status
    return status if status != 404 else (await client.get("/health_generate", timeout_s=_SAMPLED_S)).status


def server_environment(gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a launched server: this process's environment without torchrun's variables.

    Python's output isn't buffered. If `gpus` are given, the server sees only these GPUs.
    """
    kept = {name: value for name, value in os.environ.items() if not _is_torchruns(name)}
    return kept | {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def _is_torchruns(name: str) -> bool:
    return name in _TORCHRUNS or name.startswith("TORCHELASTIC_")


def free_port() -> int:
    """Return an unused TCP port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """A command and all processes that it starts.

    All of them are terminated on `close`, and when this Python process ends, no matter how it ends.
    """

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
        """Number of times that the command may still be restarted after it ended."""
        self._supervisor: asyncio.subprocess.Process | None = None

    @property
    def ended(self) -> bool:
        """Whether the command was started and has ended."""
        return self._supervisor is not None and self._supervisor.returncode is not None

    @property
    def pid(self) -> int | None:
        """Id of the operating-system session that the server and its children run in; None if nothing is running.

        It is also the process id of the supervisor, which leads the session.
        """
        running = self._supervisor is not None and self._supervisor.returncode is None
        return self._supervisor.pid if running and self._supervisor is not None else None

    async def start(self) -> None:
        """Start the command.

        Raises:
            EngineError: If its program isn't installed.
        """
        if shutil.which(self.command[0]) is None:
            raise EngineError(f"command: cannot launch a server, because there is no program {self.command[0]!r}")
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
        """Restart the command after it has ended. The output is appended to the same log."""
        self.restarts_left -= 1
        await self.close()
        await self.start()

    async def ready(self, client: JsonClient, *, startup_s: float, progress: Progress | None) -> None:
        """Wait until the server is ready.

        Args:
            client: A client of the server.
            startup_s: Maximum seconds to wait.
            progress: Called with a message each time the last line of the log changes. The message contains the
                elapsed and the maximum seconds, and that line.

        Raises:
            EngineError: If the server ends or takes too long. The message quotes the end of its log.
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
            raise EngineError(f"the server ended during startup: {self._why()}")
        with suppress(ConnectionError):
            status = await readiness(client, 5.0)
            if status == 404:
                raise EngineError(f"the server {NOT_SGLANG}")
            return status == 200
        return False

    def _why(self) -> str:
        tail = self.log_tail()
        if "No module named 'sglang" in tail or "No module named sglang" in tail:
            return (
                f"{self.command[0]} has no SGLang: set AGENTGYM_SGLANG to the launch command of a Python that has it; "
                "see docs/sglang.md in a checkout"
            )
        return tail

    def log_tail(self, lines: int = _LOG_TAIL) -> str:
        """Return the last nonempty lines of the server's log."""
        with suppress(OSError):
            said = self.log.read_bytes()[-(1 << 14) :].decode(errors="replace").splitlines()
            return "\n".join([line for line in said if line.strip()][-lines:])
        return ""

    async def close(self) -> None:
        """Terminate the command and everything it started. Closing twice is harmless."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        supervisor.stdin.close()  # the supervisor then terminates the server and itself
        await asyncio.shield(supervisor.wait())

"""Which SGLang servers to use, or how to launch them."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

COMMAND = "AGENTGYM_SGLANG"
"""Environment variable: the command that launches a server where the config names none."""
_MARGIN = 16
"""Ids of context that a server keeps for itself: 7 in SGLang 0.5.23."""


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """Servers to attach to, or else to launch; the last fields hold for both."""

    urls: tuple[str, ...] = ()
    """Servers that run already, as http://host:port; empty: launch."""
    servers: int = 1
    """How many to launch."""
    command: str = ""
    """What launches a server, before the flags, as a shell would split it; empty: the environment variable
    AGENTGYM_SGLANG, or else `python -m sglang.launch_server` with the Python that runs this."""
    arguments: str = ""
    """Further flags for a launched server, as a shell would split them: "--tp 2 --mem-fraction-static 0.8"."""
    max_lora_rank: int = 16
    """Largest rank of an adapter that a launched server takes."""
    lora_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The linear layers that an adapter may change in a launched server."""
    startup_s: float = 600.0
    """A launched server that is not ready by then is given up."""
    slots: int = 64
    """Rollouts at once; a launched server runs as many requests."""
    context_tokens: int = 512
    """Most ids of a session, prompt and completion together, where the servers allow as many."""
    adapters: Literal["tensors", "disk"] = "tensors"
    """How an adapter reaches the servers: in the request, or through a folder that they can read."""
    health_s: float = 10.0
    """Seconds between two health checks; a server that does not answer one within as many is lost."""
    stall_s: float = 60.0
    """A server that answers health checks, but samples no id for this many seconds when asked for one, is lost."""
    server_wait_s: float = 120.0
    """For a request that no server can take, or a new adapter: how long it waits for one to come back, or for a busy
    one; 0 fails at once. A launched server that has ended does not come back, and is not waited for."""

    def __post_init__(self) -> None:
        for name in ("servers", "slots", "context_tokens", "max_lora_rank", "startup_s", "health_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        if not self.server_wait_s >= 0:
            raise ValueError(f"server_wait_s: must be at least 0, got {self.server_wait_s}")
        twice = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if twice:
            raise ValueError(f"urls: {twice} appear twice")

    def launch_command(self, model: str, *, port: int, context_limit: int) -> list[str]:
        """The command line of a server for `model`, whose positions end at `context_limit`."""
        flags: list[Sequence[str]] = [
            ("--model-path", model, "--host", "127.0.0.1", "--port", str(port)),
            ("--context-length", str(min(self.context_tokens + _MARGIN, context_limit))),
            ("--max-running-requests", str(self.slots)),
            ("--enable-lora", "--max-lora-rank", str(self.max_lora_rank)),
            ("--lora-target-modules", *self.lora_modules),
            shlex.split(self.arguments),
        ]
        return [*self._launcher(), *(word for words in flags for word in words)]

    def _launcher(self) -> Sequence[str]:
        return shlex.split(self.command or os.environ.get(COMMAND, "")) or (
            sys.executable,
            "-m",
            "sglang.launch_server",
        )

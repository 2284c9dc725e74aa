"""Settings of SGLang servers: those to attach to, or to launch."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from agentgym.field_checks import Above0, Name, NotNegative, Positive, Text, check_fields

COMMAND = "AGENTGYM_SGLANG"
"""The environment variable with the command that launches a server, where the config names none."""
_MARGIN = 16
"""Ids added to a launched server's context, for it keeps some for itself: 7 in SGLang 0.5.23."""


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """Settings of the SGLang engine; `slots` and the fields after it hold for attached and launched servers."""

    urls: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Servers that run already, as http://host:port; empty launches new ones."""
    servers: Positive = 1
    """Number of servers to launch."""
    command: Text = ""
    """The command that launches a server, before its flags, as a shell would split it; empty takes that of the
    environment variable AGENTGYM_SGLANG, or else `python -m sglang.launch_server` with the Python that runs this."""
    arguments: Text = ""
    """Further flags for a launched server, as a shell would split them: "--tp 2 --mem-fraction-static 0.8"."""
    max_lora_rank: Positive = 16
    """Largest rank of an adapter that a launched server takes."""
    lora_modules: Annotated[tuple[Name, ...], Field(strict=False)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The linear layers that an adapter may change in a launched server."""
    startup_s: Above0 = 600.0
    """Seconds after which a launched server that is not ready is ended with an error."""
    slots: Positive = 64
    """Rollouts at once; a launched server runs as many requests at once."""
    context_tokens: Positive = 512
    """Most ids of a session, prompt and completion together; a server's own lower limit comes first."""
    adapters: Literal["tensors", "disk"] = "tensors"
    """The way of an adapter to the servers: "tensors" in the request, "disk" through a folder that they can read."""
    health_s: Above0 = 10.0
    """Seconds between two health checks, and for each answer; a server that misses one gets no more requests."""
    stall_s: Above0 = 60.0
    """Seconds in which a server must sample an id when asked for one; otherwise it gets no more requests."""
    server_wait_s: NotNegative = 120.0
    """Seconds that a request or a new adapter waits while no server can take it; 0 fails at once. A launched server
    that has ended is not waited for."""

    def __post_init__(self) -> None:
        check_fields(self, SGLangConfig)
        twice = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if twice:
            raise ValueError(f"urls: {twice} appear twice; name each server once")

    def launch_command(self, model: str, *, port: int, context_limit: int) -> list[str]:
        """Return the command line of a server for `model`, whose positions end at `context_limit`."""
        flags: list[Sequence[str]] = [
            ("--model-path", model, "--host", "127.0.0.1", "--port", str(port)),
            ("--context-length", str(min(self.context_tokens + _MARGIN, context_limit))),
            ("--max-running-requests", str(self.slots)),
            ("--enable-lora", "--max-lora-rank", str(self.max_lora_rank)),
            ("--lora-target-modules", *self.lora_modules),
            shlex.split(self.arguments),
        ]
        return [*self._launcher(), *(flag for group in flags for flag in group)]

    def _launcher(self) -> Sequence[str]:
        return shlex.split(self.command or os.environ.get(COMMAND, "")) or (
            sys.executable,
            "-m",
            "sglang.launch_server",
        )

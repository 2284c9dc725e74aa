"""Settings of SGLang servers to attach to or to launch."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from agentgym.config_fields import Above0, Count, Name, NotNegative, Positive, Text, config

COMMAND = "AGENTGYM_SGLANG"
"""The environment variable with the command that launches a server. It is used if the config has no command."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers that an adapter may change in a launched server."""
_MARGIN = 16
"""Number of ids added to the context that a launched server is given, because the server reserves some of it: 7 ids in
SGLang 0.5.23.
"""

_MORE_SERVERS = "launch more servers instead: a server with data parallelism accepts neither adapters nor weights"
_OWN_FLAGS = {
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "set tp"),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), _MORE_SERVERS),
    "--base-gpu-id": "set gpus",
}
"""Server flags that `arguments` must not contain, each with what to do instead."""


@config(frozen=True, kw_only=True)
class SGLangConfig:
    """Settings of the SGLang engine. `slots` and the fields after it apply to attached and launched servers."""

    urls: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Running servers to attach to, as http://host:port. If empty, new servers are launched."""
    servers: Positive = 1
    """Number of servers to launch."""
    command: Text = ""
    """The command that launches a server, without the flags, quoted as for a shell. If empty, it comes from the
    environment variable AGENTGYM_SGLANG, or is `python -m sglang.launch_server` with the current Python.
    """
    tp: Positive = 1
    """GPUs per launched server, across which its weights are split (tensor parallelism)."""
    gpus: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """GPUs of the launched servers, `tp` per server, as indices from 0 into the GPUs that this process sees. If empty,
    servers get the GPUs that no trainer uses. The trainers use the first GPUs: one for each of their processes on the
    machine.
    """
    host: Name = "127.0.0.1"
    """The address that launched servers listen on. Anyone who can reach it can send them requests."""
    colocate: Literal["off", "keep", "drop"] = "off"
    """How launched servers share the trainer's GPUs. off: not at all. keep: during training, they release the memory of
    their KV cache. drop: they release the memory of both the KV cache and the weights, and keep a copy of the weights
    in host memory.
    """
    restarts: Count = 3
    """Maximum number of times that a launched server is restarted after it exits unexpectedly."""
    arguments: Text = ""
    """Extra flags for launched servers, quoted as for a shell: "--mem-fraction-static 0.8"."""
    api_key_env: Name = "AGENTGYM_SGLANG_API_KEY"
    """The environment variable with the API key of attached servers. If it isn't set, requests have no key."""
    max_lora_rank: Positive = 16
    """Largest adapter rank that a launched server supports. A run raises it to its train.lora_rank."""
    startup_s: Above0 = 600.0
    """Seconds after which a launched server that isn't ready is terminated with an error."""
    slots: Positive = 64
    """Number of rollouts that run at the same time. A launched server runs as many requests at the same time."""
    context_tokens: Positive | None = None
    """Maximum number of ids in a session, prompt and completion together, unless a server's own limit is lower. None:
    the server's limit, which depends on the model's positions and the GPU's memory.
    """
    adapters: Literal["tensors", "disk", "merged"] = "tensors"
    """How adapters get to the servers. tensors: in the body of the request that loads them. disk: through a folder that
    the servers can read. merged: merged into the servers' own weights, which are then pushed instead.
    """
    bucket_mb: Positive = 256
    """Megabytes of merged weights per request. Each request contains at least one tensor, however large."""
    health_s: Above0 = 10.0
    """Seconds between two health checks, and timeout of each response. A server that doesn't respond gets no more
    requests.
    """
    stall_s: Above0 = 60.0
    """Seconds within which a server must sample an id on request; otherwise it gets no more requests."""
    server_wait_s: NotNegative = 120.0
    """Maximum number of seconds for which a request or a new adapter waits while no server is available; 0 fails at
    once. If all servers are launched ones that have ended for good, nothing waits.
    """

    def __post_init__(self) -> None:
        twice = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if twice:
            raise ValueError(f"urls: {twice} appear twice; list each server once")
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus: {list(self.gpus)} contains a GPU twice; servers cannot share GPUs")
        if self.urls and (self.gpus or self.colocate != "off"):
            field = "gpus" if self.gpus else "colocate"
            raise ValueError(
                f"{field}: only for launched servers, but the servers in urls are already running; leave it out"
            )
        for flag, field in _OWN_FLAGS.items():
            if any(word.partition("=")[0] == flag for word in shlex.split(self.arguments)):
                raise ValueError(f"arguments: {flag} is not allowed; {field}")

    def launch_command(self, model: str, *, port: int, context_limit: int) -> list[str]:
        """Return the command line of a server.

        Args:
            model: The model to serve.
            port: The port to listen on.
            context_limit: The model's number of positions.
        """
        flags: list[Sequence[str]] = [
            ("--model-path", model, "--host", self.host, "--port", str(port)),
            ("--max-running-requests", str(self.slots)),
        ]
        if self.context_tokens is not None:
            flags.append(("--context-length", str(min(self.context_tokens + _MARGIN, context_limit))))
        if self.tp > 1:
            flags.append(("--tp-size", str(self.tp)))
        if self.adapters != "merged":
            flags.append(("--enable-lora", "--max-lora-rank", str(self.max_lora_rank)))
            flags.append(("--lora-target-modules", *LORA_MODULES))
        if self.colocate != "off":
            flags.append(("--enable-memory-saver",))
        if self.colocate == "drop":
            flags.append(("--enable-weights-cpu-backup",))
        command = self.command or os.environ.get(COMMAND, "")
        launcher = shlex.split(command) or [sys.executable, "-m", "sglang.launch_server"]
        return [*launcher, *(flag for group in flags for flag in group), *shlex.split(self.arguments)]

    @property
    def api_key(self) -> str | None:
        """The servers' API key; None if the environment variable isn't set."""
        return os.environ.get(self.api_key_env)

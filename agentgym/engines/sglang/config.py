"""Settings of SGLang servers: those to attach to, or to launch."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from agentgym.config_fields import Above0, Count, Name, NotNegative, Positive, Text, config

COMMAND = "AGENTGYM_SGLANG"
"""The environment variable with the command that launches a server, where the config names none."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers that an adapter may change in a launched server."""
_MARGIN = 16
"""Ids added to a launched server's context, for it keeps some for itself: 7 in SGLang 0.5.23."""

_MORE_SERVERS = "launch more servers instead: a server with data parallelism takes neither adapters nor weights"
_OWN_FLAGS = {
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "set tp"),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), _MORE_SERVERS),
    "--base-gpu-id": "set gpus",
}
"""Flags of a server that `arguments` may not hold, and what to do."""


@config(frozen=True, kw_only=True)
class SGLangConfig:
    """Settings of the SGLang engine; `slots` and the fields after it hold for attached and launched servers."""

    urls: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Servers that run already, as http://host:port; empty launches new ones."""
    servers: Positive = 1
    """Number of servers to launch."""
    command: Text = ""
    """The command that launches a server, before its flags, as a shell would split it; empty takes that of the
    environment variable AGENTGYM_SGLANG, or else `python -m sglang.launch_server` with the Python that runs this."""
    tp: Positive = 1
    """GPUs of each launched server, over which its weights are cut (tensor parallelism)."""
    gpus: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """GPUs of the launched servers, `tp` for each, numbered from 0 among those that this process sees; empty gives them
    those that no trainer uses. Trainers have the first ones, one for each process of the machine."""
    host: Name = "127.0.0.1"
    """The address that launched servers listen at; whoever reaches it may ask them."""
    colocate: Literal["off", "keep", "drop"] = "off"
    """Whether launched servers share the trainer's GPUs. While it trains they give up the memory of their KV cache
    (keep), or that and their weights, of which they keep a copy in the host's memory (drop)."""
    restarts: Count = 3
    """Times that a launched server is started again when it ends by itself."""
    arguments: Text = ""
    """Further flags for a launched server, as a shell would split them: "--mem-fraction-static 0.8"."""
    api_key_env: Name = "AGENTGYM_SGLANG_API_KEY"
    """Name of the environment variable with the API key of attached servers; their requests have no key where it is not
    set."""
    max_lora_rank: Positive = 16
    """Largest rank of an adapter that a launched server takes; a run raises it to its train.lora_rank."""
    startup_s: Above0 = 600.0
    """Seconds after which a launched server that is not ready is ended with an error."""
    slots: Positive = 64
    """Rollouts at once; a launched server runs as many requests at once."""
    context_tokens: Positive | None = None
    """Most ids of a session, prompt and completion together; a server's own lower limit comes first. None: that limit,
    which is what the model has positions for and the GPU has memory for."""
    adapters: Literal["tensors", "disk", "merged"] = "tensors"
    """The way of an adapter to the servers: "tensors" in the request, "disk" through a folder that they can read,
    "merged" into the servers' own weights, which are pushed in its place."""
    bucket_mb: Positive = 256
    """Megabytes of merged weights in one request, at least one tensor."""
    health_s: Above0 = 10.0
    """Seconds between two health checks, and for each answer; a server that misses one gets no more requests."""
    stall_s: Above0 = 60.0
    """Seconds in which a server must sample an id when asked for one; otherwise it gets no more requests."""
    server_wait_s: NotNegative = 120.0
    """Seconds that a request or a new adapter waits while no server can take it; 0 fails at once. A launched server
    that has ended is not waited for."""

    def __post_init__(self) -> None:
        twice = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if twice:
            raise ValueError(f"urls: {twice} appear twice; name each server once")
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus: {list(self.gpus)} names one twice; each server has GPUs of its own")
        if self.urls and (self.gpus or self.colocate != "off"):
            field = "gpus" if self.gpus else "colocate"
            raise ValueError(
                f"{field}: it is for servers that are launched, and those of urls run already; leave it out"
            )
        for flag, field in _OWN_FLAGS.items():
            if any(word.partition("=")[0] == flag for word in shlex.split(self.arguments)):
                raise ValueError(f"arguments: {flag} is set by a field of its own, or is not to be set; {field}")

    def launch_command(self, model: str, *, port: int, context_limit: int) -> list[str]:
        """Return the command line of a server for `model`, whose positions end at `context_limit`."""
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
        """The API key of the servers; None where they need none."""
        return os.environ.get(self.api_key_env)

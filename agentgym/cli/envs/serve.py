"""The command `agentgym serve`: serves an env's tools as an MCP server."""

import asyncio
import json
import secrets
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import tyro

from agentgym.cli.envs.names import NONE, Parameters, find, task_of
from agentgym.cli.output import say
from agentgym.environments.env import Env, Split
from agentgym.errors import AgentGymError
from agentgym.types.task import Task


def serve(
    env: tyro.conf.Positional[str],
    split: Split = "train",
    number: int = 0,
    task: str | None = None,
    seed: int = 0,
    port: int | None = None,
    host: str = "127.0.0.1",
    token: bool = True,
    parameters: Parameters = NONE,
) -> int:
    """Serve the tools of an environment as an MCP server, for one episode of one task.

    The server uses standard input and output, or HTTP with --port, until its client hangs up or Ctrl-C. With HTTP, it
    prints its address, and refuses requests without the token in it. The tool `answer` sends the text that a model
    would write without a tool call. The resource agentgym://task contains the task's messages. The resource
    agentgym://outcome contains the rewards, which are also printed on stderr at the end. docs/mcp-server.md has more.
    --env.NAME VALUE sets a parameter of the environment.

    For example:
    $ agentgym serve hello
    $ agentgym serve hello --split test --number 3 --port 8000
    $ claude mcp add hello -- agentgym serve hello

    Args:
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class.
        split: The split that the task is from.
        number: The task's number in the split, starting at 0.
        task: The task's id, instead of its number.
        seed: The env's seed.
        port: Serve HTTP on this port, 0 for a free one. Without it, use standard input and output.
        host: With --port, the address to listen on.
        token: With --port, require the token in the address.
    """
    cls = find(env, parameters)
    chosen = task_of(cls, split, number, task)
    if port is not None and not 0 <= port < 1 << 16:
        raise AgentGymError(f"--port: must be from 0 to 65535, got {port}; 0 picks a free one")
    try:
        listener = None if port is None else socket.create_server((host, port))
    except OSError as error:
        why = f"cannot listen on {host}:{port} ({error.strerror})"
        raise AgentGymError(f"--port: {why}; choose another port, or 0 for a free one") from None
    if port is not None and not token:
        sys.stderr.write(
            "agentgym: anybody who can reach this address can play the episode; omit --no-token to prevent it\n"
        )
    with suppress(KeyboardInterrupt, asyncio.CancelledError):  # The usual ways for a server to end.
        asyncio.run(_serve(cls, chosen, seed, listener, secrets.token_urlsafe(24) if token else None))
    return 0


async def _serve(cls: type[Env[Any]], task: Task, seed: int, listener: socket.socket | None, token: str | None) -> None:
    """Serve until the client hangs up, or Ctrl-C or SIGTERM ends the server; then write the outcome to stderr."""
    from agentgym.bridges.mcp_server import PATH, open_episode, serve_http, serve_stdio

    serving = asyncio.current_task()
    assert serving is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    async with open_episode(cls, task, seed=seed) as episode:
        try:
            if listener is None:
                await serve_stdio(episode)
            else:
                host, port = listener.getsockname()[:2]
                say(f"http://{host}:{port}{PATH}" + (f"?token={token}" if token else ""))
                sys.stdout.flush()
                await serve_http(episode, listener, token=token)
        finally:
            sys.stderr.write(f"agentgym: outcome {json.dumps(episode.outcome)}\n")

"""Transports of an MCP server: standard input and output, or Streamable HTTP."""

import asyncio
import secrets
import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from mcp.server.stdio import stdio_server
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentgym.bridges.mcp_server.episode import EpisodeServer

PATH = "/mcp"
"""URL path that serves Streamable HTTP."""
GOODBYE_S = 2
"""Seconds that open requests have to finish when the server ends."""


async def serve_stdio(episode: EpisodeServer) -> None:
    """Serve over this process's standard input and output until the client hangs up.

    Args:
        episode: The episode to serve.
    """
    server = episode.server
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def serve_http(episode: EpisodeServer, listener: socket.socket, *, token: str | None) -> None:
    """Serve on a listening socket under the path /mcp until cancelled; all clients share the episode.

    Args:
        episode: The episode to serve.
        listener: The socket.
        token: A secret that each request must include, as `?token=` in its URL or as a bearer token in its
            Authorization header; other requests get 403. None accepts everybody who can reach the socket, which on a
            loopback address is every user of this machine.

    Raises:
        ValueError: If the token is empty.
    """
    if token == "":
        raise ValueError("token: must not be empty; None accepts everybody")
    app = episode.server.streamable_http_app(streamable_http_path=PATH, host=listener.getsockname()[0])
    if token is not None:
        app = _Guard(app, token)
    server = _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GOODBYE_S))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


class _Guard:
    """Refuses requests without the token before anything reads them."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._brings_token(Request(scope)):
            await self._app(scope, receive, send)
            return
        said = "The token is missing or wrong; use the whole address that this server printed.\n"
        await PlainTextResponse(said, 403)(scope, receive, send)

    def _brings_token(self, request: Request) -> bool:
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = bearer if kind.lower() == "bearer" else request.query_params.get("token", "")
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token)


class _Server(uvicorn.Server):  # type: ignore[misc]
    def capture_signals(self) -> AbstractContextManager[None]:
        """Leave signals to the program, which closes the env before it ends."""
        return nullcontext()

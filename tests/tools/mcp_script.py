"""An MCP server for tests, written with the package `mcp`: over stdin and stdout, or with `http` over HTTP."""

# mypy: disable-error-code="untyped-decorator"

import asyncio
import base64
import os
import socket
import sys
from typing import Annotated

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""An image of one pixel."""
server = MCPServer("desk")
noted: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Write a note, and read all of them."""
    noted.append(text)
    return " ".join(noted)


@server.tool(name="count.all/notes")
def count() -> int:
    """Count the notes."""
    return len(noted)


@server.tool(name="read first note")
def first() -> str:
    """Read the first note."""
    return noted[0]


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def surroundings(name: str) -> str:
    """Read a variable of the environment."""
    return os.environ.get(name, "not set")


@server.tool()
def name(self: str, tool: str, arguments: str) -> str:
    """Take parameters whose names others use, too."""
    return f"{self} {tool} {arguments}"


@server.tool()
def picture() -> Image:
    """Take a picture."""
    return Image(data=b"pixels", format="png")


@server.tool()
def photo() -> list[str | Image]:
    """Take a photo, and say what it is of."""
    return ["a desk", Image(data=PNG, format="png")]


@server.tool()
def lock(word: Annotated[str, Field(json_schema_extra={"pattern": r"^(?=.*\d)\w+$"})], times: int = 1) -> str:
    """Take a word with a digit, which the server itself checks."""
    if not any(letter.isdigit() for letter in word):
        raise ToolError(f"{word} has no digit")
    return "locked"


@server.tool()
async def wait() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return "never"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


def serve_http() -> None:
    """Serve at a free port, which is printed once it accepts connections."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)  # noqa: T201  read by the test
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        serve_http()
    else:
        server.run("stdio")

"""Tools of MCP servers: programs that communicate over stdin and stdout, and HTTP addresses."""

import asyncio
import base64
import json
import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from agentgym.errors import EnvError, ToolError
from agentgym.errors.extras import needs_extra
from agentgym.errors.tracebacks import describe
from agentgym.tools.argument_schemas import checked, validator_of
from agentgym.tools.at_once import ended
from agentgym.tools.dynamic import DynamicTool, check_names
from agentgym.tools.hard_patterns import without_hard_patterns
from agentgym.tools.tool import TIMEOUT_S, check_settings
from agentgym.types.messages import IMAGE_TYPES, Image
from agentgym.types.tool_names import TOOL

log = logging.getLogger(__name__)


class ServerEnded(Exception):
    """The server ended during a call. The model reads this error, and the next call to the server fails its rollout."""


class MCP:
    """The tools of one MCP server, for an env's `extra_tools`: `return await self.server.open()`.

    If an instance creates it in `__init__` and closes it in `close`, each rollout has a separate session. If all
    instances share it, for example in a class attribute, there is one session for all of them; `async with` closes it,
    or the end of the event loop does. If the server has ended, the next `open` restarts it.

    Args:
        command: A program and its arguments. From this process's environment it gets little but PATH and HOME.
        url: An address that speaks Streamable HTTP, instead of a command.
        env: Environment variables for the command.
        headers: Headers for each request to the url.
        names: The tools to use; None uses all of the server's tools.
        prefix: Text put in front of each tool's name.
        timeout_s: Maximum seconds of one call.
        open_timeout_s: Maximum seconds to start the server and list its tools.
        parallel: Whether calls to the server may run at the same time.
        images: Whether to show the model images in results, which it must support. If False, the model reads a note
            that an image is not shown.

    Raises:
        ValueError: If settings conflict; the message names them.
        MissingPackage: If the package `mcp` isn't installed.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        names: Collection[str] | None = None,
        prefix: str = "",
        timeout_s: float = TIMEOUT_S,
        open_timeout_s: float = 60.0,
        parallel: bool = False,
        images: bool = True,
    ) -> None:
        _check_place(command, url, env, headers)
        check_settings(timeout_s, parallel)
        check_settings(open_timeout_s, parallel, "open_timeout_s")
        check_names(names)
        if not isinstance(images, bool):
            raise ValueError(f"images: must be True or False, got {images!r:.80}")
        with needs_extra():
            import mcp  # noqa: F401  Imported here, because it takes a second, and not in the first rollout.
        self.command, self.url, self.names, self.prefix = list(command or ()), url, names, prefix
        self.timeout_s, self.open_timeout_s, self.parallel, self.images = timeout_s, open_timeout_s, parallel, images
        self._env, self._headers = dict(env or {}), dict(headers or {})
        self._session: _Session | None = None

    @property
    def name(self) -> str:
        """The command, or the address without parts that may be secret."""
        if self.url is None:
            return shlex.join(self.command)
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def __repr__(self) -> str:
        return f"<MCP {self.name}>"

    async def open(self) -> list[DynamicTool]:
        """Open the session if none is open, and return the server's tools.

        Returns:
            The tools, or those of them that `names` lists.

        Raises:
            EnvError: If the server doesn't start, doesn't respond in time, or lacks one of `names`.
        """
        session = self._session
        if session is None or not session.is_open:
            session = self._session = _Session(self, session)
        listed = (await session.opened()).tools
        names = [tool.name for tool in listed]
        if unknown := [name for name in self.names or () if name not in names]:
            raise EnvError(
                f"names: {unknown[0]!r} is not a tool of {self.name}; its tools are {', '.join(names) or 'none'}"
            )
        chosen = [tool for tool in listed if self.names is None or tool.name in self.names]
        renamed = TOOL.renamed(f"{self.prefix}{tool.name}" for tool in chosen)
        for before, after in renamed.items():
            _say_renamed(self.name, before, after)
        return [self._tool(tool, renamed) for tool in chosen]

    async def close(self) -> None:
        """End the session, if there is one.

        If this call is cancelled, it still waits for the session's end before it raises.
        """
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        """Open the session."""
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _tool(self, tool: Any, renamed: Mapping[str, str]) -> DynamicTool:
        """Return a tool of the server; schema parts that take too long to check are checked only by the server.

        Args:
            tool: The tool as the server describes it.
            renamed: The names that tools can't have, with those that they get instead.
        """
        relaxed, check = without_hard_patterns(tool.input_schema), None
        for field in relaxed.fields:
            _say_unchecked(self.name, tool.name, field, all_of_it=relaxed.allows_all)
        if relaxed.fields:
            check = partial(checked, validator_of(json.dumps(relaxed.schema), f"tool {tool.name!r}"))
        name = f"{self.prefix}{tool.name}"
        return DynamicTool(
            renamed.get(name, name),
            tool.description or "",
            tool.input_schema,
            partial(self._called, tool.name),
            timeout_s=self.timeout_s,
            parallel=self.parallel,
            check=check,
        )

    async def _called(self, tool: str, /, **arguments: Any) -> str | list[str | Image]:
        """Call a tool of the server, and return its result as text, or as a list of texts and images."""
        session = self._session
        if session is None or not session.is_open:
            raise EnvError(f"the MCP server {self.name} has {'ended' if session else 'been closed'}")
        result = await session.call(tool, arguments)
        if result.is_error:
            raise ToolError(_text_of(result) or "the server gave no reason")
        if not self.images or not result.content:
            return _text_of(result)
        shown = [_shown(block) for block in result.content]
        texts = [block for block in shown if isinstance(block, str)]
        return "\n".join(texts) if len(texts) == len(shown) else shown

    async def _target(self, stack: AsyncExitStack) -> Any:
        """Return the target that the client of the package `mcp` connects to; `stack` closes the resources it needs."""
        from mcp import StdioServerParameters
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        if self.url is None:
            return StdioServerParameters(command=self.command[0], args=self.command[1:], env=self._env)
        if not self._headers:
            return self.url
        http_client = await stack.enter_async_context(create_mcp_http_client(headers=self._headers))
        return streamable_http_client(self.url, http_client=http_client)


@cache
def _say_unchecked(server: str, tool: str, field: str, *, all_of_it: bool) -> None:
    log.warning(
        "the MCP server %s: tool %r: the pattern of %s can't be matched in linear time; %s checked only by the server, "
        "not here",
        server,
        tool,
        field,
        "the schema also uses not, oneOf, if or contains, so the arguments are" if all_of_it else "it is",
    )


@cache
def _say_renamed(server: str, before: str, after: str) -> None:
    log.warning("the MCP server %s: no tool may be called %r, so the model reads the name %r", server, before, after)


def _check_place(
    command: Sequence[str] | None,
    url: str | None,
    env: Mapping[str, str] | None,
    headers: Mapping[str, str] | None,
) -> None:
    if (command is None) == (url is None):
        raise ValueError('command, url: pass exactly one of them, such as `ag.MCP(command=["uvx", "mcp-server-time"])`')
    if command is not None and (isinstance(command, str) or not command):
        raise ValueError(f'command: must be a list, such as ["uvx", "mcp-server-time"], got {command!r}')
    if url is not None and urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"url: must begin with http:// or https://, got {url!r:.80}")
    if env is not None and command is None:
        raise ValueError("env: only applies to a command; a server at a url has its own environment")
    if headers is not None and url is None:
        raise ValueError("headers: only apply to a url; for a command, pass `env`")


class _Opened(NamedTuple):
    client: Any
    tools: list[Any]


class _Session:
    """One session with a server; one asyncio task opens and closes it, whichever task requests that."""

    def __init__(self, server: MCP, before: "_Session | None") -> None:
        self.server, self._loop = server, asyncio.get_running_loop()
        self._opened: asyncio.Future[_Opened] = self._loop.create_future()
        self._closing = asyncio.Event()
        self.lost = False
        """Whether a call found that the server has ended."""
        self._owner = asyncio.create_task(self._run(before), name=f"agentgym-mcp {server.name}")
        self._owner.add_done_callback(self._settle)  # An asyncio task cancelled before it starts runs no code.

    @property
    def is_open(self) -> bool:
        """Whether calls are possible, or will be once it has opened."""
        here = self._loop is asyncio.get_running_loop()
        return here and not (self.lost or self._closing.is_set() or self._owner.done())

    async def opened(self) -> _Opened:
        """Wait until the server has listed its tools; raise EnvError if it doesn't."""
        return await asyncio.shield(self._opened)

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool of the server and return the server's result.

        Raises:
            ToolError: If the server rejects the call.
            ServerEnded: If the connection is lost.
        """
        from anyio import BrokenResourceError, ClosedResourceError
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = (await self.opened()).client
        try:
            return await client.call_tool(tool, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(error.message) from error
            lost: Exception = error
        except (BrokenResourceError, ClosedResourceError) as error:
            lost = error
        self.lost = True
        raise ServerEnded(f"the MCP server {self.server.name} has ended or can't be reached") from lost

    async def close(self) -> None:
        """End the session, even while it is opening; it has ended when this returns or raises."""
        self._closing.set()
        if self._loop is asyncio.get_running_loop():
            await ended([self._owner], cancel=not self._opened.done())

    async def _run(self, before: "_Session | None") -> None:
        try:
            if before is not None:
                await before.close()
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.server.open_timeout_s):
                    opened = await self._open(stack)
                self._opened.set_result(opened)
                await self._closing.wait()
        except Exception as error:
            self._tell(error)

    def _settle(self, owner: "asyncio.Task[None]") -> None:
        if not self._opened.done():
            self._refuse(EnvError(f"the MCP server {self.server.name} was closed before it had opened"))

    async def _open(self, stack: AsyncExitStack) -> _Opened:
        from mcp import Client

        target = await self.server._target(stack)
        client = await stack.enter_async_context(Client(target, cache=None))
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return _Opened(client, tools)

    def _tell(self, error: Exception) -> None:
        """Report why the session failed to open, or log the error that occurred while it was closed."""
        found: BaseException = error
        while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
            found = found.exceptions[0]
        why = f"no tool list after {self.server.open_timeout_s:g} s" if isinstance(found, TimeoutError) else ""
        if self._opened.done():
            log.warning("the MCP server %s raised %s when it was closed", self.server.name, describe(found))
            return
        failed = EnvError(f"the MCP server {self.server.name} did not open: {why or describe(found)}")
        failed.__cause__ = found
        self._refuse(failed)

    def _refuse(self, error: EnvError) -> None:
        self._opened.set_exception(error)
        self._opened.exception()  # Mark it as retrieved, or asyncio would log it if nobody waits.


def _text_of(result: Any) -> str:
    """Return a result's texts; other content is named in brackets, because the model doesn't see it."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_block_text(block) for block in result.content)


def _shown(block: Any) -> str | Image:
    """Return a content block of a result as the model is shown it.

    Returns:
        The block's image if models can be shown images of its type; otherwise the block's text, or a note in
            brackets.
    """
    held = block.resource if block.type == "resource" else block
    written = getattr(held, "blob", None) or getattr(held, "data", None)
    if not written or held.mime_type not in IMAGE_TYPES:
        return _block_text(block)
    try:
        return Image(base64.b64decode(written, validate=True), held.mime_type)
    except ValueError as error:  # base64 raises a ValueError, too.
        return f"[{held.mime_type}, not shown: {error}]"


def _block_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[link to {block.uri}]"
    held = block.resource if block.type == "resource" else block
    if (text := getattr(held, "text", None)) is not None:
        return str(text)
    return f"[{held.mime_type or 'data'}, not shown]"

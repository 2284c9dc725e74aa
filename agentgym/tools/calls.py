"""Tool calls, and their results as the model reads them.

If a call goes wrong, the model reads a tool message that says why: an unknown name, invalid JSON, a wrong argument, an
exception or a timeout. A failure of the sandbox (SandboxError) or of the machine (MachineError) is raised instead.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from agentgym.data.plain import NotPlainError, plain
from agentgym.errors import AgentGymError, SandboxKilledError, ToolError, alone, must_pass, of_machine
from agentgym.errors.tracebacks import describe, log_once
from agentgym.machine.time_limits import TimeLimit
from agentgym.tools.dynamic import AnyTool
from agentgym.tools.streams import joined
from agentgym.tools.tool import Stop, WrongArguments, class_tools
from agentgym.tools.tool_threads import call_method
from agentgym.types.json_values import UNSOUND, is_sound, members_of
from agentgym.types.messages import Content, Image, content_of


@dataclass(slots=True, kw_only=True)
class ToolResult:
    """The result of one tool call."""

    content: Content
    """The text that the model reads, or parts if the tool returned an image."""
    error: bool = False
    """Whether anything went wrong, in the call or in the tool."""
    malformed: bool = False
    """Whether the call never reached a tool, because it isn't JSON, names an unknown tool, or has a wrong argument."""
    failed: bool = False
    """Whether the tool raised (not ToolError), timed out, or returned something other than text, images or JSON."""
    stop: str | None = None
    """The reason if the tool ended the rollout; None if the rollout continues."""
    seconds: float = 0.0
    """Seconds from the call to its result."""


_example: ContextVar[str] = ContextVar("call_example", default='{"name": "NAME", "arguments": {"KEY": "VALUE"}}')


@contextmanager
def calls_written_as(example: str) -> Iterator[None]:
    """Set how the model writes a call, for the messages about malformed calls in the block.

    Args:
        example: A call of NAME with the argument KEY, as the model's response format has it. If it is "", the format
            isn't known, and the messages show JSON.
    """
    if not example:
        yield
        return
    before = _example.set(example)
    try:
        yield
    finally:
        _example.reset(before)


def offered(owner: object) -> Mapping[str, AnyTool]:
    """Return an instance's tools by the name that the model uses: those of its class, then its own."""
    cls: type = type(owner)
    own: Mapping[str, AnyTool] | None = getattr(owner, "_extra_tools", None)
    return {**class_tools(cls), **own} if own else class_tools(cls)


async def dispatch(
    owner: object, name: str, arguments: Mapping[str, Any] | str, *, allowed_tools: Collection[str] | None = None
) -> ToolResult:
    """Call a tool of `owner` and return its result; if the model made a mistake, the result says what to fix.

    Args:
        owner: The env whose tool is called.
        name: The tool's name, as the model wrote it.
        arguments: A mapping, or the raw text if the model's call was not valid JSON.
        allowed_tools: Names of the tools that this caller may use; None allows the root conversation's tools.

    Returns:
        The result, with the seconds that the call took.

    Raises:
        AgentGymError: If the tool raised one. The model reads a ToolError or SandboxKilledError instead.
        EnvError: If an attribute of the env hides the tool.
        MachineError: If the tool failed because the machine ran out of something, such as memory.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    made = offered(owner).get(name)
    result = _bound(owner, made, name, arguments, allowed_tools)
    if not isinstance(result, ToolResult):
        assert made is not None
        result = await _outcome(owner, made, made.function_of(owner), result)
    result.seconds = loop.time() - start
    return result


def _bound(
    owner: object,
    made: AnyTool | None,
    name: str,
    arguments: Mapping[str, Any] | str,
    allowed_tools: Collection[str] | None,
) -> dict[str, Any] | ToolResult:
    """Return the call's validated arguments, or the result that tells the model what is wrong with the call."""
    try:
        given = _load(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return _not_read(_unread(name, arguments, error))
    if not name:
        return _not_read(_UNREAD)
    if made is None or not _is_allowed(made, name, allowed_tools):
        tools = [known for known, its in offered(owner).items() if _is_allowed(its, known, allowed_tools)]
        return _malformed(f"unknown tool {name!r}; the tools are: {', '.join(tools) or 'none'}")
    try:
        return made.bind(given)
    except WrongArguments as error:
        return _malformed(f"wrong arguments for tool {name!r}: {error}")


def _unread(name: str, arguments: Any, error: Exception) -> str:
    """Return why a call can't be read. A text that doesn't begin as JSON may be in a format without JSON."""
    if name:
        return f"invalid JSON in the call to tool {name!r}: {error}"
    if arguments.lstrip().startswith(("{", "[")):
        return f"invalid JSON in the tool call: {error}"
    return _UNREAD


_UNREAD = "the tool call cannot be read"


def _is_allowed(made: AnyTool, name: str, allowed_tools: Collection[str] | None) -> bool:
    """Return whether a caller with these allowed tools (None: the root conversation's) may use this one."""
    return made.root if allowed_tools is None else name in allowed_tools


def _load(text: str) -> Mapping[str, Any]:
    loaded = json.loads(text, object_pairs_hook=members_of)
    if not isinstance(loaded, dict):
        raise ValueError(f"the arguments must be a JSON object, got {type(loaded).__name__}")
    if not is_sound(loaded):
        raise ValueError(f"the arguments {UNSOUND}")
    return loaded


def _not_read(why: str) -> ToolResult:
    return _malformed(f"{why}; write each call like this:\n{_example.get()}")


def _malformed(content: str) -> ToolResult:
    return ToolResult(content=f"error: {content}", error=True, malformed=True)


async def _outcome(owner: object, made: AnyTool, function: Callable[..., Any], arguments: dict[str, Any]) -> ToolResult:
    """Call the tool within its time limit."""
    limit, said = TimeLimit(made.timeout_s), list[str]()
    try:
        returned = await limit.bound(_called(owner, made, function, arguments, said))
        if type(returned) is not str and inspect.isasyncgen(returned):
            returned = await limit.bound(joined(returned, said, _shown(owner, made)))
        return _read(returned)
    except BaseException as raised:  # A tool that calls sys.exit() must not end the training.
        error = alone(raised)
        if not isinstance(error, AgentGymError) and (lacking := of_machine(error)) is not None:
            lacking.where = _named(owner, made)
            raise lacking from error
        result = _error(owner, made, function, error, limit)
        if result is None and error is not raised:
            raise error from error.__cause__
        if result is None:
            raise
    if said:
        result.content += f"\nOutput before the error:\n{''.join(said)}"
    return result


def _error(
    owner: object, made: AnyTool, function: Callable[..., Any], error: BaseException, limit: TimeLimit
) -> ToolResult | None:
    """Return a result that tells the model about a tool's error, or None if the error should be raised."""
    if isinstance(error, ToolError):
        return ToolResult(content=f"error: {describe(error).removeprefix('ToolError: ')}", error=True)
    if isinstance(error, SandboxKilledError):
        return ToolResult(content=error.told, error=True)
    if isinstance(error, AgentGymError):
        error.where = error.where or _named(owner, made)
        return None
    if must_pass(error):
        return None
    if isinstance(error, TimeoutError) and limit.expired():
        text = f"error: tool {made.name!r} timed out after {made.timeout_s:g} s"
        return ToolResult(content=text, error=True, failed=True)
    if isinstance(error, asyncio.CancelledError):
        text = f"error: tool {made.name!r} failed: CancelledError: something it was waiting for was cancelled"
        return ToolResult(content=text, error=True, failed=True)
    return _failed(owner, made, function, error)


def _called(
    owner: object, made: AnyTool, function: Callable[..., Any], arguments: dict[str, Any], said: list[str]
) -> Coroutine[Any, Any, Any]:
    """Return a coroutine that calls the tool when it is awaited; its value may be an async generator.

    If the tool itself is an async generator, the texts that it yields are appended to `said` as they come.
    """
    code = getattr(function, "__code__", None)
    flags = 0 if code is None else code.co_flags
    if flags & inspect.CO_COROUTINE:  # The usual case, which needs no wrapper.
        work: Coroutine[Any, Any, Any] = function(**arguments)
        return work
    if flags & inspect.CO_ASYNC_GENERATOR:
        return joined(function(**arguments), said, _shown(owner, made))
    threads = getattr(owner, "_threads", None)
    return call_method(function, arguments, name=f"agentgym-tool {made.name}", threads=threads)


def _shown(owner: object, made: AnyTool) -> str:
    """Return the names of the tool, its env and its task, for the log of streamed text."""
    task = getattr(getattr(owner, "task", None), "id", None)
    return _named(owner, made) + (f", task {task}" if task else "")


def _failed(owner: object, made: AnyTool, function: Callable[..., Any], error: BaseException) -> ToolResult:
    """Return the result that tells the model about the failure, and log the failure once for each line that raises."""
    log_once(_named(owner, made), error, function)
    text = f"error: tool {made.name!r} failed: {describe(error)}"
    return ToolResult(content=text, error=True, failed=True)


def _named(owner: object, made: AnyTool) -> str:
    return f"tool {made.name!r} of {type(owner).__name__}"


def _read(returned: object) -> ToolResult:
    if type(returned) is str:
        return ToolResult(content=returned)
    try:
        if isinstance(returned, Stop):
            return ToolResult(content=as_content(returned.content), stop=returned.reason)
        return ToolResult(content=as_content(returned))
    except Exception as error:
        raise TypeError(f"the tool returned a value that is neither text nor JSON: {describe(error)}") from error


def as_content(value: object) -> Any:
    """Return a tool's return value as its message's content: parts if it has an `ag.Image`, otherwise text."""
    if isinstance(value, Image):
        return content_of([value], "it returned")
    if isinstance(value, list | tuple) and any(isinstance(part, Image) for part in value):
        return content_of([part if isinstance(part, Image) else as_text(part) for part in value], "it returned")
    return as_text(value)


def as_text(value: object) -> str:
    """Return a tool's return value as the model reads it: text unchanged, None as "", anything else as JSON.

    Raises:
        TypeError: If the value has no JSON form (see `plain`), such as bytes, a function, or an object whose only text
            is its memory address. The message says where in the value that is.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if type(value) is int:  # The same text as json.dumps, at a tenth of the cost.
        return str(value)
    try:
        made = plain(value, _raw)
    except NotPlainError as error:
        where = "".join(f"[{key!r}]" for key in error.where)
        raise TypeError(f"{error}{where and f', at {where}'}") from error
    if isinstance(made, str):
        return made
    return (_MODEL if isinstance(value, BaseModel) else _JSON).encode(made)


def _raw(value: object) -> object:
    """Return the `str` of a value that JSON can't contain; for example, a pydantic secret becomes asterisks.

    Raises:
        NotPlainError: If the value consists of bytes.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raise NotPlainError(f'{type(value).__name__}; return text, such as data.decode(errors="replace")')
    return str(value)


_JSON, _MODEL = json.JSONEncoder(ensure_ascii=False), json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""The encoders of tool results: `_MODEL` for pydantic models, and `_JSON` for all other values.

They are created once, because `json.dumps` with these settings would create an encoder for each value.
"""

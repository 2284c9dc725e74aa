"""Calls of tools, and their outcomes as the model reads them.

A tool's failure is an answer that the model reads: an unknown name, bad JSON, a wrong argument, an exception and a
time-out each become a tool message. The failure of a sandbox (SandboxError) or of the machine (MachineError) is raised
instead.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Coroutine, Mapping
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
from agentgym.types.json_values import UNSOUND, is_sound
from agentgym.types.messages import Content, Image, content_of


@dataclass(slots=True, kw_only=True)
class ToolResult:
    """The outcome of one tool call."""

    content: Content
    """The text that the model reads, or parts where the tool returned an image."""
    error: bool = False
    """Whether anything went wrong, in the call or in the tool."""
    malformed: bool = False
    """Whether the call reached no tool: it is no JSON, names an unknown tool, or has a wrong argument."""
    failed: bool = False
    """Whether the tool's own code raised (not ToolError), timed out or returned no text, image or JSON."""
    stop: str | None = None
    """The reason where the tool ended the rollout; None where it goes on."""
    seconds: float = 0.0
    """Seconds from the call to its outcome."""


def offered(owner: object) -> Mapping[str, AnyTool]:
    """Return the tools of an instance by the name that the model uses: those of its class, then its own."""
    cls: type = type(owner)
    own: Mapping[str, AnyTool] | None = getattr(owner, "_extra_tools", None)
    return {**class_tools(cls), **own} if own else class_tools(cls)


async def dispatch(
    owner: object, name: str, arguments: Mapping[str, Any] | str, *, allowed_tools: Collection[str] | None = None
) -> ToolResult:
    """Call a tool of `owner`; whatever the model got wrong comes back as a text that it can act on.

    `arguments` is a mapping, or the raw text where the model's call was no valid JSON. `allowed_tools` names the tools
    that this caller may use; None allows those of the root.

    :raises AgentGymError: from inside the tool, all kinds but ToolError; EnvError where an attribute hides the tool.
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
    """The validated arguments of the call; what the model reads where there is something wrong with it."""
    try:
        given = _load(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        of = f" in the call of tool {name!r}" if name else " in the tool call"
        return _malformed(f'invalid JSON{of}: {error}; write {{"name": ..., "arguments": {{...}}}}')
    if made is None or not _is_allowed(made, name, allowed_tools):
        tools = [known for known, its in offered(owner).items() if _is_allowed(its, known, allowed_tools)]
        return _malformed(f"unknown tool {name!r}; the tools are: {', '.join(tools) or 'none'}")
    try:
        return made.bind(given)
    except WrongArguments as error:
        return _malformed(f"wrong arguments for tool {name!r}: {error}")


def _is_allowed(made: AnyTool, name: str, allowed_tools: Collection[str] | None) -> bool:
    """Whether a caller that may use these tools, None for those of the root, may use this one."""
    return made.root if allowed_tools is None else name in allowed_tools


def _load(text: str) -> Mapping[str, Any]:
    loaded = json.loads(text)
    if not isinstance(loaded, dict):
        raise ValueError(f"the arguments must be an object, got {type(loaded).__name__}")
    if not is_sound(loaded):
        raise ValueError(f"they {UNSOUND}")
    return loaded


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
        result.content += f"\nIt had said before:\n{''.join(said)}"
    return result


def _error(
    owner: object, made: AnyTool, function: Callable[..., Any], error: BaseException, limit: TimeLimit
) -> ToolResult | None:
    """The error of a tool as the model reads it; None where it is to be raised."""
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
        text = f"error: tool {made.name!r} failed: CancelledError: something that it waited for was cancelled"
        return ToolResult(content=text, error=True, failed=True)
    return _failed(owner, made, function, error)


def _called(
    owner: object, made: AnyTool, function: Callable[..., Any], arguments: dict[str, Any], said: list[str]
) -> Coroutine[Any, Any, Any]:
    """The call of a tool, which begins when it is awaited; what it returns may be an async generator."""
    code = getattr(function, "__code__", None)
    flags = 0 if code is None else code.co_flags
    if flags & inspect.CO_COROUTINE:  # The usual case, which needs nothing around it.
        work: Coroutine[Any, Any, Any] = function(**arguments)
        return work
    if flags & inspect.CO_ASYNC_GENERATOR:
        return joined(function(**arguments), said, _shown(owner, made))
    threads = getattr(owner, "_threads", None)
    return call_method(function, arguments, name=f"agentgym-tool {made.name}", threads=threads)


def _shown(owner: object, made: AnyTool) -> str:
    """What is said of a tool where its texts are shown."""
    task = getattr(getattr(owner, "task", None), "id", None)
    return _named(owner, made) + (f", task {task}" if task else "")


def _failed(owner: object, made: AnyTool, function: Callable[..., Any], error: BaseException) -> ToolResult:
    """The failure as the model reads it; the user finds it in the log, once for each line that raises it."""
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
        raise TypeError(f"it returned what is neither text nor JSON: {describe(error)}") from error


def as_content(value: object) -> Any:
    """Return a tool's return value as the content of its message: parts where an `ag.Image` is among it, else text."""
    if isinstance(value, Image):
        return content_of([value], "it returned")
    if isinstance(value, list | tuple) and any(isinstance(part, Image) for part in value):
        return content_of([part if isinstance(part, Image) else as_text(part) for part in value], "it returned")
    return as_text(value)


def as_text(value: object) -> str:
    """Return a tool's return value as the model reads it: text as it is, None as "", the rest as JSON.

    :raises TypeError: for what has no form in JSON (`plain`), such as bytes, a function, and an object whose only text
        is its address in memory; it names where in the value that is.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if type(value) is int:  # As JSON writes it, at a tenth of the cost.
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
    """Return the stars of a secret; TypeError for bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise NotPlainError(f'{type(value).__name__}; return text, such as data.decode(errors="replace")')
    return str(value)


_JSON, _MODEL = json.JSONEncoder(ensure_ascii=False), json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Made once: `json.dumps` with these settings makes an encoder for each value."""

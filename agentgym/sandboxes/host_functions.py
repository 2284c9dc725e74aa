"""Answers to the code in a box that calls functions of the host."""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from inspect import isawaitable
from typing import Any

from agentgym.boxes import HostFunction
from agentgym.errors import AgentGymError, ToolError

MAX_FILE = 16 << 20
"""Bytes of the largest body of a frame: of a file, or of an answer."""
MAX_ASKS = 1000


def begin_answer(body: bytes, serve: Mapping[str, HostFunction] | None) -> bytes | Awaitable[object]:
    """Call a host function: its answer, or an awaitable of it. Errors of infrastructure are raised."""
    try:
        if serve is None:
            raise ToolError(f"over {MAX_ASKS} calls of host functions in one cell")
        name, args, kwargs = _question(body)
        if name not in serve:
            raise ToolError(f"there is no host function {name!r} in this call")
        value = serve[name](*args, **kwargs)
        return value if isawaitable(value) else _answer(value)
    except Exception as error:
        return _refusal(error)


async def finish_answer(value: Awaitable[object]) -> bytes:
    """Return the answer once the function has returned it; errors of infrastructure are raised."""
    try:
        return _answer(await value)
    except Exception as error:
        return _refusal(error)


def _answer(value: object) -> bytes:
    answer = json.dumps({"value": value}).encode()
    if len(answer) > MAX_FILE:
        raise ToolError(f"an answer of {len(answer)} bytes is over {MAX_FILE}")
    return answer


def _refusal(error: Exception) -> bytes:
    """The answer that code in the box reads; an error of infrastructure is raised here instead."""
    if isinstance(error, AgentGymError) and not isinstance(error, ToolError):
        raise error
    text = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": text[:10_000]}).encode()


async def cancelled(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end; its result is dropped."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _question(body: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    try:
        name, args, kwargs = json.loads(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolError("a question that is not JSON") from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise ToolError("a question that is not a name and its arguments")
    return name, args, kwargs

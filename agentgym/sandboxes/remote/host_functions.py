"""Answers to the code in a sandbox that calls functions of the host."""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from inspect import isawaitable, signature
from typing import Any

from agentgym.errors import AgentGymError, ToolError
from agentgym.errors.tracebacks import log_once
from agentgym.sandboxes.protocol import HostFunction

MAX_FILE = 16 << 20
"""Bytes of the largest body of a frame: of a file, or of an answer."""
MAX_ASKS = 1000
MAX_VALUES = 100_000
"""The most values in the arguments of one call: the event loop decodes them, and stands still meanwhile."""
MAX_REASON = 10_000


def begin_answer(body: bytes, serve: Mapping[str, HostFunction] | None) -> bytes | Awaitable[bytes]:
    """Call a host function: its answer, or an awaitable of it. Errors of infrastructure are raised."""
    try:
        if serve is None:
            raise ToolError(f"over {MAX_ASKS} calls of host functions in one cell")
        name, args, kwargs = _question(body)
        if name not in serve:
            raise ToolError(f"there is no host function {name!r} in this call")
    except ToolError as error:
        return _told(error)
    return _Asked(name, serve[name], args, kwargs).begin()


@dataclass(frozen=True, slots=True)
class _Asked:
    """One call of a host function."""

    name: str
    function: HostFunction
    args: list[Any]
    kwargs: dict[str, Any]

    def begin(self) -> bytes | Awaitable[bytes]:
        """Return the answer, or an awaitable of it."""
        try:
            value = self.function(*self.args, **self.kwargs)
            return self._finish(value) if isawaitable(value) else self._answer(value)
        except (Exception, asyncio.CancelledError) as error:
            return self._refusal(error)

    async def _finish(self, value: Awaitable[object]) -> bytes:
        try:
            return self._answer(await value)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # The call has ended; else what the function waited for was cancelled.
            return self._refusal(error)
        except Exception as error:
            return self._refusal(error)

    def _answer(self, value: object) -> bytes:
        try:
            answer = json.dumps({"value": value}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            self._log(error)
            raise ToolError(f"the answer of the host function {self.name!r} is not JSON") from error
        if len(answer) > MAX_FILE:
            raise ToolError(f"an answer of {len(answer)} bytes is over {MAX_FILE}")
        return answer

    def _refusal(self, error: BaseException) -> bytes:
        """The answer that code in the sandbox reads; an error of infrastructure is raised here instead.

        Only the text of a ToolError is meant for it. That of another error may hold what the function keeps.
        """
        if isinstance(error, ToolError):
            return _told(error)
        if isinstance(error, AgentGymError):
            raise error
        wrong = self._wrong_arguments() if isinstance(error, TypeError) else None
        if wrong is not None:
            return _told(ToolError(f"{self.name}: {wrong}"))
        self._log(error)
        return _told(ToolError(f"{type(error).__name__} in the host function {self.name!r}"))

    def _wrong_arguments(self) -> str | None:
        """Say how the arguments do not fit the function's parameters; None if they fit, or nothing says."""
        try:
            parameters = signature(self.function)
        except (TypeError, ValueError):  # One of those that are written in C.
            return None
        try:
            parameters.bind(*self.args, **self.kwargs)
        except TypeError as error:
            return str(error)
        return None

    def _log(self, error: BaseException) -> None:
        log_once(f"the host function {self.name!r}", error, self.function)


def _told(error: ToolError) -> bytes:
    try:
        text = str(error)
    except Exception:
        text = type(error).__name__
    return json.dumps({"error": text[:MAX_REASON]}).encode()


async def cancelled(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end; its result is dropped."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _question(body: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    if _values(body) > MAX_VALUES and _values(_without_texts(body)) > MAX_VALUES:
        raise ToolError(f"over {MAX_VALUES} values in the arguments of one call; pass them as one text")
    try:
        name, args, kwargs = json.loads(body.decode())  # Of bytes it would take other encodings, too.
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolError("a question that is not JSON") from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise ToolError("a question that is not a name and its arguments")
    return name, args, kwargs


def _values(body: bytes) -> int:
    """The most values and keys that JSON can hold; what its texts hold counts, too."""
    return sum(body.count(mark) for mark in (b",", b"[", b"{", b":"))


def _without_texts(body: bytes) -> bytes:
    """JSON without its texts, all of it where there are too many of them."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2]) if plain.count(b'"') <= 2 * MAX_VALUES else body

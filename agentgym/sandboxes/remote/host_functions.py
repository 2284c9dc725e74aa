"""The host's answers to code in a sandbox that calls host functions."""

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
"""Maximum bytes of a frame's body, whether it is a file or an answer."""
MAX_ASKS = 1000
MAX_VALUES = 100_000
"""Maximum number of values in the arguments of one call, because decoding them blocks the event loop."""
MAX_REASON = 10_000


def begin_answer(body: bytes, serve: Mapping[str, HostFunction] | None) -> bytes | Awaitable[bytes]:
    """Call the host function that code in a sandbox requests, and return the answer or an awaitable of it.

    Infrastructure errors are raised here instead of becoming an answer.

    Args:
        body: The request: the function's name and its arguments, as JSON.
        serve: The host functions that the code may call; None if the cell has used up its calls, so the answer is an
            error.
    """
    try:
        if serve is None:
            raise ToolError(f"more than {MAX_ASKS} host function calls in one cell")
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
        """Call the function and return the answer, or an awaitable of it."""
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
                raise  # The call has ended. Otherwise, something the function awaited was cancelled.
            return self._refusal(error)
        except Exception as error:
            return self._refusal(error)

    def _answer(self, value: object) -> bytes:
        try:
            answer = json.dumps({"value": value}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            self._log(error)
            raise ToolError(f"the host function {self.name!r} returned a value that is not JSON") from error
        if len(answer) > MAX_FILE:
            raise ToolError(f"the host function returned {len(answer)} bytes of JSON, but the limit is {MAX_FILE}")
        return answer

    def _refusal(self, error: BaseException) -> bytes:
        """Return the error answer that code in the sandbox reads; infrastructure errors are raised here instead.

        The code gets only the text of a ToolError, because other errors' texts may contain data that must stay on the
        host.
        """
        if isinstance(error, ToolError):
            return _told(error)
        if isinstance(error, AgentGymError):
            raise error
        wrong = self._wrong_arguments() if isinstance(error, TypeError) else None
        if wrong is not None:
            return _told(ToolError(f"{self.name}: {wrong}"))
        self._log(error)
        return _told(ToolError(f"the host function {self.name!r} raised {type(error).__name__}"))

    def _wrong_arguments(self) -> str | None:
        """Return how the arguments don't fit the function's parameters.

        The result is None if they fit, or if the function has no signature.
        """
        try:
            parameters = signature(self.function)
        except (TypeError, ValueError):  # Some functions written in C.
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
        raise ToolError(f"more than {MAX_VALUES} values in the arguments of one call; pass them as one string")
    try:
        name, args, kwargs = json.loads(body.decode())  # json.loads would accept bytes in other encodings, too.
    except (ValueError, TypeError, RecursionError) as error:
        raise ToolError("the call is not valid JSON") from error
    if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict)):
        raise ToolError("the call is not a function name with its arguments")
    return name, args, kwargs


def _values(body: bytes) -> int:
    """Return an upper bound on the number of values and keys in a JSON text.

    The bound is too high if strings in the text contain commas, colons or opening brackets, which are counted, too.
    """
    return sum(body.count(mark) for mark in (b",", b"[", b"{", b":"))


def _without_texts(body: bytes) -> bytes:
    """Return a JSON text without its strings, or unchanged if it has too many of them."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2]) if plain.count(b'"') <= 2 * MAX_VALUES else body

"""Assertions for the checks: each compares a result with the expected one.

The argument `what` names the result in the message.
"""

from collections.abc import Awaitable
from typing import get_args

from agentgym.errors import SandboxContentError
from agentgym.sandboxes.protocol import ExecResult, Status


def same(what: str, got: object, promised: object) -> None:
    """Raise AssertionError if the value, or its type, differs from the expected one."""
    if type(got) is not type(promised) or got != promised:
        raise AssertionError(f"{what}: expected {promised!r}, got {got!r:.300}")


def holds(what: str, is_so: bool) -> None:
    """Raise AssertionError if the claim is false."""
    if not is_so:
        raise AssertionError(f"{what}: expected this to be true, but it is false")


def result(what: str, got: object, **promised: object) -> ExecResult:
    """Return a program's result, checked to be an ExecResult with a valid status and with these values.

    Args:
        what: The result's name in the message.
        got: The result.
        **promised: The expected values of fields of ExecResult, by name.

    Raises:
        AssertionError: If the type, the status or a value differs.
    """
    if not isinstance(got, ExecResult):
        raise AssertionError(f"{what}: expected an ExecResult, got {got!r:.300}")
    if got.status not in get_args(Status):
        raise AssertionError(
            f"{what}: expected a status of agentgym.sandboxes.protocol.Status, got {got.status!r:.300}"
        )
    for name, value in promised.items():
        same(f"{what}: {name}", getattr(got, name), value)
    return got


async def refuses(what: str, kind: type[Exception], call: Awaitable[object]) -> None:
    """Raise AssertionError unless the call raises an error of that kind that is also a SandboxContentError.

    If a reward method makes such a call, a SandboxContentError makes that reward 0.0. After any other error, the
    rollout has no reward and isn't trained on.
    """
    await raises(what, kind, call, content=True)


async def raises(what: str, kind: type[Exception], call: Awaitable[object], *, content: bool = False) -> None:
    """Raise AssertionError unless the call raises an error of that kind.

    Args:
        what: The call's name in the message.
        kind: The expected class of the error.
        call: The call to await.
        content: Whether the error must be a SandboxContentError, too.
    """
    try:
        answer = await call
    except kind as error:
        if content and not isinstance(error, SandboxContentError):
            said = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{what}: expected a SandboxContentError, got {said}") from error
        return
    except Exception as error:
        raise AssertionError(f"{what}: expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what}: expected {kind.__name__}, got the result {answer!r:.300}")

"""The words of a broken promise: each check compares what came back with what is promised."""

from collections.abc import Awaitable
from typing import get_args

from agentgym.errors import SandboxContentError
from agentgym.sandboxes.protocol import ExecResult, Status


def same(what: str, got: object, promised: object) -> None:
    """Raise AssertionError where it is another value, or one of another type."""
    if type(got) is not type(promised) or got != promised:
        raise AssertionError(f"{what}: {promised!r} is promised, got {got!r:.300}")


def holds(what: str, is_so: bool) -> None:
    """Raise AssertionError where it is not so."""
    if not is_so:
        raise AssertionError(f"{what}: it is not so")


def result(what: str, got: object, **promised: object) -> ExecResult:
    """Return the result of a program; AssertionError where it is none, or has other values than these."""
    if not isinstance(got, ExecResult):
        raise AssertionError(f"{what}: an ExecResult is promised, got {got!r:.300}")
    if got.status not in get_args(Status):
        raise AssertionError(
            f"{what}: a status of agentgym.sandboxes.protocol.Status is promised, got {got.status!r:.300}"
        )
    for name, value in promised.items():
        same(f"{what}: {name}", getattr(got, name), value)
    return got


async def refuses(what: str, kind: type[Exception], call: Awaitable[object]) -> None:
    """Raise AssertionError unless the call raises a SandboxContentError of that kind: in a reward any other one is
    None."""
    await raises(what, kind, call, content=True)


async def raises(what: str, kind: type[Exception], call: Awaitable[object], *, content: bool = False) -> None:
    """Raise AssertionError where the call answers, or raises anything else."""
    try:
        answer = await call
    except kind as error:
        if content and not isinstance(error, SandboxContentError):
            said = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{what}: a SandboxContentError is promised, got {said}") from error
        return
    except Exception as error:
        raise AssertionError(f"{what}: {kind.__name__} is promised, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what}: {kind.__name__} is promised, got the answer {answer!r:.300}")

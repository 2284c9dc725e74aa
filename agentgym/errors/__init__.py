"""agentgym's errors, named after the part that failed, and `Failure`, the record of an error in a rollout.

Users raise plain Python exceptions in their environments and tools; `boundary` converts them once, where they enter
agentgym's code.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from agentgym.errors.exhausted import exhausted
from agentgym.errors.tracebacks import describe, encodable, place_of, users_traceback


class AgentGymError(Exception):
    """Base class of all errors that agentgym raises on purpose, except ValueError for bad arguments."""

    where: str = ""
    """The first `boundary` that the error crossed, such as "Bugfix.step" or "lease"; "" if it crossed none."""


class EngineError(AgentGymError):
    """The engine couldn't respond: it is closed, broken, or got an impossible request."""

    sent_again: int = 0
    """Number of times that the request was sent again before this error, for an engine that counts them."""


class SandboxError(AgentGymError):
    """A sandbox died or couldn't be started.

    It is an infrastructure failure: never text for the model, never a reward.
    """


class SandboxKilledError(SandboxError):
    """A sandbox was killed by the code in it. This is a result of the episode: it is scored, and never retried.

    In a tool it becomes the text that the model reads; a reward method that raises it counts as 0.0.
    """

    told = "[sandbox terminated by your code]"
    """The text for the model."""


class MachineError(AgentGymError):
    """The machine had no thread, process or file descriptor left for the env; never text for the model."""


class ClosedError(SandboxError):
    """A pool, sandbox, branch, program or shell was used after it was closed; the message says which, when and why."""


class ToolError(AgentGymError):
    """A tool failure that the model should read; its text becomes the tool message."""


class PolicyContentError(ToolError):
    """The policy wrote or left behind something unusable; the rollout is scored, and doesn't fail.

    If a tool raises it, the model reads its text. If a reward raises it, the reward is 0.0, and a metric counts it.
    """

    counted: ClassVar[str] = "policy_content"
    """Name of the metric that counts the reward methods that raised this error, and stop reason of a rollout whose step
    raised it.
    """


class ModelLimitError(PolicyContentError):
    """A request to an auxiliary model is too long for that model's context, or exceeds the limit on calls."""

    counted = "model_limit"


class SandboxContentError(PolicyContentError):
    """A sandbox's content, or text meant for a sandbox, is unusable.

    If the sandbox itself fails, a SandboxError is raised instead.

    It is raised if a sandbox's file is missing, too large, not readable or not UTF-8, or is a folder, a link, a pipe or
    a device, and if a path, a command or code can't be used in any sandbox. Depending on the reason, it is also a
    FileNotFoundError, an OSError with the kernel's error number, a TimeoutError or a ValueError. If a tool raises it,
    the model reads its text. If a reward raises it, the reward is 0.0, and the metric `sandbox_content` counts it.
    """

    counted = "sandbox_content"


class EnvError(AgentGymError):
    """The user's environment raised an exception, which is chained; the message names the line of the user's code."""


class ContextOverflow(AgentGymError):
    """The first prompt alone doesn't fit the context, so nothing can be sampled."""


class WireError(AgentGymError):
    """The other end of a connection sent something that the protocol doesn't allow."""


def is_stray(error: BaseException | None) -> bool:
    """Return whether an error is a CancelledError although nobody cancelled the running asyncio task.

    Awaiting a future or a task that someone else cancelled raises such an error. If it propagated, the running task
    would end as cancelled, and the error would go unnoticed.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = _running_task()
    return task is not None and not task.cancelling()


def must_pass(error: BaseException) -> bool:
    """Return whether an error doesn't belong to the code that raises it, and must propagate unchanged.

    This is true of KeyboardInterrupt, of the cancellation of the running asyncio task, and of exception groups that
    contain a KeyboardInterrupt or a CancelledError. It is also true of GeneratorExit if no asyncio task runs, because a
    coroutine is being closed then. Every other error belongs to the code that raised it, even SystemExit, or
    GeneratorExit in a running task.
    """
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup((KeyboardInterrupt, asyncio.CancelledError)) is not None
    if isinstance(error, asyncio.CancelledError):
        return not is_stray(error)
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, GeneratorExit) and _running_task() is None)


def alone(error: BaseException) -> BaseException:
    """Return the error that best represents an exception group; return any other error unchanged.

    For a group, including the groups nested in it, that is the first agentgym error that isn't a ToolError. If there
    is none, it is the group's only error, or the first one if all are PolicyContentErrors. Any other group is
    returned unchanged, and so is a group for which `must_pass` is true. An engine or a sandbox that fails in an
    `asyncio.TaskGroup` of the user's code therefore still counts as a failure of the engine or the sandbox.
    """
    if not isinstance(error, BaseExceptionGroup) or must_pass(error):
        return error
    found = list(_errors_in(error))
    ours = [each for each in found if isinstance(each, AgentGymError) and not isinstance(each, ToolError)]
    same = len(found) == 1 or all(isinstance(each, PolicyContentError) for each in found)
    return ours[0] if ours else found[0] if same else error


def content_error(error: BaseException | None) -> PolicyContentError | None:
    """Return the error itself if it is a PolicyContentError, or else the nearest one among its causes, or None.

    The causes are those of `raise ... from`. An exception group counts as the error that `alone` returns for it.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error = alone(error)
        if isinstance(error, PolicyContentError):
            return error
        error = error.__cause__
    return None


def of_machine(error: BaseException) -> MachineError | None:
    """Return a MachineError if the machine ran out of threads, processes or file descriptors, or None for other errors.

    `agentgym.errors.exhausted` decides whether the machine or the code that raised the error is at fault.
    """
    what = exhausted(error)
    if what is None:
        return None
    place = place_of(error)
    return MachineError(f"{what} on this machine: {describe(error)}{f', at {place}' if place else ''}")


def _errors_in(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """Yield the errors of a group and of its nested groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _errors_in(error)
        else:
            yield error


def _running_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # No event loop runs here.
        return None


class boundary:
    """Context manager around calls of code that isn't agentgym's; raises that code's exceptions as a `kind` of error.

    The new error has the exception as its cause, and its message starts with `where`. If `kind` is EnvError and the
    machine has run out of threads, processes or file descriptors, a MachineError is raised instead (`of_machine`).

    Two kinds of exceptions aren't converted: those for which `must_pass` is true, and agentgym's own errors other
    than ToolError, whose attribute `where` is set if it is empty. All others are converted, including a ToolError
    outside of a tool and exceptions that aren't subclasses of Exception. An exception group is treated as the error
    that `alone` returns for it.

    Args:
        kind: The class of the errors to raise, such as EnvError.
        where: Name of the call that is made, such as "Bugfix.step".
    """

    __slots__ = ("kind", "where")

    def __init__(self, kind: type[AgentGymError], where: str) -> None:
        self.kind, self.where = kind, where

    def __enter__(self) -> None:
        """Do nothing; exceptions are converted when the `with` block ends."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None:
            self.cross(error)
        return False

    def cross(self, error: BaseException) -> None:
        """Raise the error that `error` is converted to; return if it isn't converted, so that the caller re-raises it.

        In code that runs often, `except BaseException as error: edge.cross(error); raise`, where `edge` is a
        boundary, replaces `with edge:` and costs nothing if nothing is raised.
        """
        given, error = error, alone(error)
        if isinstance(error, AgentGymError) and not isinstance(error, ToolError):
            error.where = error.where or self.where
            if error is not given:
                raise error from error.__cause__
        elif not must_pass(error):
            if self.kind is EnvError and (lacking := of_machine(error)) is not None:
                lacking.where = self.where
                raise lacking from error
            stray = is_stray(error) and not str(error)
            said = "CancelledError: nobody cancelled the rollout" if stray else describe(error)
            place = place_of(error) if self.kind is EnvError else ""
            crossed = self.kind(f"{self.where}: {said}{f', at {place}' if place else ''}")
            crossed.where = self.where
            raise crossed from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rollout has no reward: the error that ended it, and where the user's own code raised it."""

    type: str
    """The error's class in this module, such as EnvError, SandboxError or EngineError."""
    message: str
    """The error's text, with the line of the user's code; later errors are appended, separated by "; "."""
    where: str = ""
    """The call that failed, such as "Bugfix.setup", "Bugfix: reward 'fixed'" or "lease"; "" if there is none."""
    traceback: str = ""
    """The traceback of the user's exception and its causes, from the user's first line on; "" if there is none."""

    @classmethod
    def of(cls, error: AgentGymError) -> Self:
        """Return the record of an error: its message with its notes, and its traceback.

        Lone surrogates in them are escaped (`encodable`).
        """
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        return cls(
            type=next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__),
            message=encodable(said),
            where=encodable(error.where),
            traceback=_traceback_of(error),
        )

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


def _traceback_of(error: AgentGymError) -> str:
    """Return the traceback of the error's cause or of the error itself, from the first line of the user's code on.

    The cause's is preferred. If neither has a line of the user's code, return the cause's whole traceback without
    agentgym's own lines at the top, or "" if there is no cause.
    """
    cause = error.__cause__
    if cause is None:
        return users_traceback(error)
    return users_traceback(cause) or users_traceback(error) or users_traceback(cause, or_all=True)

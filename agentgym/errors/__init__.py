"""The errors, named after the boundary they crossed, and Failure, which keeps one for a rollout.

Users raise plain Python in their environments and tools; `boundary` names the crossing once.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from agentgym.errors.exhausted import exhausted
from agentgym.errors.tracebacks import describe, encodable, place_of, users_traceback


class AgentGymError(Exception):
    """The base of every error agentgym raises on purpose; bad arguments stay ValueError."""

    where: str = ""
    """What it crossed first, such as "Bugfix.step" or "lease"; "" where it crossed nothing."""


class EngineError(AgentGymError):
    """The engine could not answer: it is closed, broken, or was asked for something impossible."""


class SandboxError(AgentGymError):
    """A sandbox died or could not be had; infrastructure, never text for the model, never a reward."""


class SandboxKilledError(SandboxError):
    """A sandbox ended because of what the code in it did: a result of the episode, which is scored, and never tried
    again.

    In a tool it becomes the text that the model reads; a reward method that raises it gives 0.0.
    """

    told = "[the sandbox was ended by the code that ran in it]"
    """The text for the model."""


class MachineError(AgentGymError):
    """The machine had no thread, process or file descriptor left that the env needs; never text for the model."""


class ClosedError(SandboxError):
    """A pool, a sandbox, a branch, a program or a shell was used after its end; the text says which, since when and
    why."""


class ToolError(AgentGymError):
    """A failure of a tool that the model should read; its text becomes the tool message."""


class PolicyContentError(ToolError):
    """The policy said or left behind something unusable: the rollout is scored, and does not fail.

    If a tool raises it, the model reads its text. If a reward raises it, the reward is 0.0, and a metric counts it.
    """

    counted: ClassVar[str] = "policy_content"
    """The metric that counts such rewards, and the stop reason of a rollout whose step raised it."""


class ModelLimitError(PolicyContentError):
    """A question is too long for the context of the model that an env asks, or one more than its limit allows."""

    counted = "model_limit"


class SandboxContentError(PolicyContentError):
    """The content of a sandbox, or a text that was meant for it, is unusable; a failing sandbox is a SandboxError
    instead.

    It is raised if a file of a sandbox is missing, too large, not readable or not UTF-8, or is a folder, a link, a pipe
    or a device, and if a path, a command or code cannot be used in any sandbox. Depending on the reason it is also a
    FileNotFoundError, an OSError with the kernel's number, a TimeoutError or a ValueError. If a tool raises it, the
    model reads its text. If a reward raises it, the reward is 0.0, and the metric `sandbox_content` counts it.
    """

    counted = "sandbox_content"


class EnvError(AgentGymError):
    """The user's environment raised; the cause is chained, and the line of the user's code is named."""


class ContextOverflow(AgentGymError):
    """The first prompt alone does not fit the context; nothing can be sampled."""


class WireError(AgentGymError):
    """The other end of a wire sent what the protocol does not allow."""


def is_stray(error: BaseException | None) -> bool:
    """Whether it is a CancelledError although nobody cancelled the task that met it.

    Code that awaits a future or a task which somebody else cancelled meets one. Let through, it would end this task as
    cancelled, and nobody would hear of that.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = _running_task()
    return task is not None and not task.cancelling()


def must_pass(error: BaseException) -> bool:
    """Whether an error is not of the code that it comes out of, and must end what runs.

    That is KeyboardInterrupt, the cancellation of the running task, and GeneratorExit where no task runs: a coroutine
    is closed there. Every other error, SystemExit and GeneratorExit too, is one of the code that raised it.
    """
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup((KeyboardInterrupt, asyncio.CancelledError)) is not None
    if isinstance(error, asyncio.CancelledError):
        return not is_stray(error)
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, GeneratorExit) and _running_task() is None)


def alone(error: BaseException) -> BaseException:
    """Return what a group of errors is about: the first of ours in it, or its only error; any other error itself.

    So an engine or a sandbox that fails in an `asyncio.TaskGroup` of the user's code is a failure of the engine or the
    sandbox.
    """
    if not isinstance(error, BaseExceptionGroup) or must_pass(error):
        return error
    found = list(_errors_in(error))
    ours = [each for each in found if isinstance(each, AgentGymError) and not isinstance(each, ToolError)]
    same = len(found) == 1 or all(isinstance(each, PolicyContentError) for each in found)
    return ours[0] if ours else found[0] if same else error


def content_error(error: BaseException | None) -> PolicyContentError | None:
    """Return the PolicyContentError that an error is, or that it was raised from; None if it has no such cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error = alone(error)
        if isinstance(error, PolicyContentError):
            return error
        error = error.__cause__
    return None


def of_machine(error: BaseException) -> MachineError | None:
    """Return the error of a machine that has run out of something; None where the error is of the code that raised it.

    `agentgym.errors.exhausted` says which is which.
    """
    what = exhausted(error)
    if what is None:
        return None
    place = place_of(error)
    return MachineError(f"{what} on this machine: {describe(error)}{f', at {place}' if place else ''}")


def _errors_in(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it."""
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
    """Turn any foreign exception into `kind`, chained and saying where; ours pass through, and remember where.

    A ToolError outside of a tool is foreign too, and every error that is no Exception, but for those of `must_pass`.
    """

    __slots__ = ("kind", "where")

    def __init__(self, kind: type[AgentGymError], where: str) -> None:
        self.kind, self.where = kind, where

    def __enter__(self) -> None:
        """Nothing to open."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None:
            self.cross(error)
        return False

    def cross(self, error: BaseException) -> None:
        """Raise what an error is behind the boundary; return where it passes as it is, and its raiser goes on.

        For `except BaseException as error: edge.cross(error); raise`, which costs nothing where nothing is raised.
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
    """The name of the error's class among those of this module, such as EnvError, SandboxError and EngineError."""
    message: str
    """The error's text, with the line of the user's code; errors that followed it stand behind it, after "; "."""
    where: str = ""
    """The call that failed, such as "Bugfix.setup", "Bugfix: reward 'fixed'" or "lease"; "" where it was none."""
    traceback: str = ""
    """The traceback of the user's exception and its causes, from the user's first line on; "" where there was none."""

    @classmethod
    def of(cls, error: AgentGymError) -> Self:
        """Keep an error, its notes and its traceback as text that can be encoded."""
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
    """The cause's where it is the user's, else the error's where it passed the user's code, else all of the cause's."""
    cause = error.__cause__
    if cause is None:
        return users_traceback(error)
    return users_traceback(cause) or users_traceback(error) or users_traceback(cause, or_all=True)

"""Environments: one class, one instance a rollout.

`Env` is the lower floor, with Gymnasium's words in Gymnasium's order, asynchronously. `ToolEnv` is the
one most people write: typed methods are the tools, other methods are the rewards.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

from agentgym.boxes import Box, Sandbox
from agentgym.environments.context_policies import Compact, Window
from agentgym.environments.forks import ForkedAgent, ForkKind, ForkManager
from agentgym.environments.limits import Limits
from agentgym.errors import EnvError
from agentgym.messages import Message
from agentgym.tools.declarations import (
    check_made,
)
from agentgym.tools.tool import tools_of
from agentgym.tools.tool_threads import Threads
from agentgym.types import StepResult, Task

TaskT = TypeVar("TaskT", bound=Task)


Split = Literal["train", "test"]


class Procedural(Sequence[TaskT]):
    """Tasks made from their index when they are asked for; the same index gives the same task."""

    def __init__(self, make: Callable[[int], TaskT], indices: range) -> None:
        self.make, self.indices = make, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> TaskT: ...
    @overload
    def __getitem__(self, index: slice) -> "Procedural[TaskT]": ...
    def __getitem__(self, index: int | slice) -> "TaskT | Procedural[TaskT]":
        if isinstance(index, slice):
            return Procedural(self.make, self.indices[index])
        return self.make(self.indices[index])


class Env(Generic[TaskT]):
    """One attempt at one task; made for a rollout, closed after it, never used twice.

    The runner sets `box` (where `sandbox` declares one) before `reset`, and calls `close` whatever happens, when the
    threads of its plain tools and rewards have ended. A class that declares what cannot work is a ValueError.
    """

    sandbox: ClassVar[Sandbox | None] = None
    limits: ClassVar[Limits] = Limits()
    context: ClassVar[Compact | Window | None] = None
    system: ClassVar[str | None] = None
    """The system message in front of each task's prompt that has none of its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        check_made(cls.limits, Limits, f"{name}.limits", "`ag.Limits(...)`")
        check_made(cls.context, Compact | Window | None, f"{name}.context", "`ag.Compact(...)` or `ag.Window(...)`")
        check_made(cls.system, str | None, f"{name}.system", "text")
        if isinstance(cls.sandbox, type):
            check_made(cls.sandbox, (), f"{name}.sandbox", "a sandbox, such as `ag.AnyBox()`")

    def __init__(self, task: TaskT) -> None:
        self.task = task
        self.metrics: dict[str, float] = {}
        """Numbers about this rollout; they are averaged over a batch in the log."""
        self.tool_failures: Counter[str] = Counter()
        """By tool: how often its own code raised, ran out of time or returned what nobody can read."""
        self._box: Box | None = None
        self._forks: ForkManager | None = None
        self._threads = Threads()

    @classmethod
    def tasks(cls, split: Split) -> Sequence[TaskT]:
        """The tasks to train on, or those held out for evaluation; the two never overlap."""
        raise NotImplementedError(f"{cls.__name__}.tasks(split): override it, or pass tasks yourself")

    @property
    def box(self) -> Box:
        """The leased box; an env that declares no `sandbox` has none."""
        if self._box is None:
            raise EnvError(f"{type(self).__name__} has no box: declare `sandbox = ag.Docker()` in the class")
        return self._box

    @box.setter
    def box(self, box: Box) -> None:
        self._box = box

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas that the chat template shows to the model, in the OpenAI shape."""
        return []

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """The first messages and an info dict; by default `system`, if set, and a copy of the task's prompt."""
        messages = deepcopy(list(self.task.prompt))
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=self.system))
        return messages, {}

    async def step(self, action: Message) -> StepResult:
        """Answer the assistant's message with new messages, a reward and whether it ended here.

        The reward counts for this turn. In the step that ends the rollout, `info["stop_reason"]` may say why, and
        `info["rewards"]` may give the outcome by name; then `score` is not asked.
        """
        raise NotImplementedError(f"{type(self).__name__}.step(action)")

    async def score(self) -> dict[str, float]:
        """Outcome rewards by name, their weights applied; they are added to the rewards of the steps.

        Asked for once, when the rollout has ended, by itself or by a limit; not where its last step gave the outcome
        in `info["rewards"]`.
        """
        return {}

    async def close(self) -> None:
        """Give back what `reset` took; called once, also after an error or a cancellation.

        No plain tool or reward of this rollout runs any more, but for one that is inside a call of C which does not
        return in five seconds; the log names it.
        """

    def fork(
        self,
        kind: ForkKind,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Callable[..., Any] | str] | None = None,
        box: bool = False,
        turns: int | None = None,
    ) -> AbstractAsyncContextManager[ForkedAgent]:
        """A second conversation under this rollout, its limits and its reward: `async with self.fork(..) as kid`.

        A "subagent" starts from `messages` alone, with `tools` (methods of this env, none by default). A "fork" goes
        on from this conversation as if it had been answered with `messages`; it keeps the tools, and its shared
        prefix is trained in the parent only. With `box` it has a branch of the box. `turns` is a limit of its own.

        The forked agent's tools run on a shallow copy of this env: what they assign to `self` stays with it, what they
        change in place is shared.
        """
        if self._forks is None:
            raise EnvError(f"{type(self).__name__}.fork: only inside a rollout, in a tool or in step()")
        if kind not in ("fork", "subagent"):
            raise ValueError(f"kind: {kind!r} is none of fork, subagent")
        if kind == "fork" and tools is not None:
            raise ValueError("tools: a fork keeps the tools of its parent, they are part of the shared prefix")
        names = None if kind == "fork" else [self._tool_name(given) for given in tools or ()]
        return self._forks.fork(self, kind, messages, tools=names, box=box, turns=turns)

    def _tool_name(self, given: Callable[..., Any] | str) -> str:
        cls: type = type(self)
        attribute = given if isinstance(given, str) else given.__name__
        for name, made in tools_of(cls).items():
            if attribute in (name, made.attribute):
                return name
        raise ValueError(f"tools: {attribute!r} is no @tool of {type(self).__name__}")


async def threads_ended(env: Env[Any]) -> None:
    """Wait until the threads of the env's plain tools and rewards have ended; after a grace the log says which not."""
    threads: Threads | None = getattr(env, "_threads", None)
    if threads is not None:
        await threads.ended(type(env).__name__)


async def close(env: Env[Any]) -> None:
    """Close the env when its threads have ended, or after a grace."""
    try:
        await threads_ended(env)
    finally:
        await env.close()


def _is_env(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Env)

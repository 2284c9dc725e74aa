"""The base class of environments.

`Env` has Gymnasium's `reset`, `step` and `close`, asynchronously and in Gymnasium's order. Most environments are a
`ToolEnv` (`tool_env.py`): its methods are the model's tools and the rewards.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import deepcopy
from types import MethodType
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from agentgym.environments.env_copy import copied
from agentgym.environments.forks import ForkedAgent, ForkKind, Model
from agentgym.environments.limits import Compact, Limits, Window
from agentgym.environments.parameters import configured
from agentgym.errors import EnvError
from agentgym.sandboxes.protocol import Sandbox, SandboxSpec
from agentgym.tools.calls import offered
from agentgym.tools.declarations import (
    check_awaited,
    check_made,
    check_on_class,
    check_opened,
    check_read,
    check_settings,
)
from agentgym.tools.tool_threads import Threads, threads_ended as threads_ended
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout
from agentgym.types.task import StepResult, Task

TaskT = TypeVar("TaskT", bound=Task)


Split = Literal["train", "test"]


class Env(Generic[TaskT]):
    """One attempt at one task: an instance is made for a rollout, closed after it, and never used twice.

    The runner sets `sandbox` before `reset` where the class declares a `sandbox`. It calls `close` once, whatever
    happens, when the threads of plain tools and rewards have ended.

    :raises ValueError: when a class is made that declares what cannot work; the message names the attribute.
    """

    sandbox_spec: ClassVar[SandboxSpec | None] = None
    """The kind of sandbox that each rollout gets, such as `ag.AnySandbox()`; None for no sandbox."""
    limits: ClassVar[Limits] = Limits()
    """The turns, seconds and tokens that one rollout may use."""
    context: ClassVar[Compact | Window | None] = None
    """How a rollout goes on when its context is full; None ends it there."""
    system: ClassVar[str | None] = None
    """The system message in front of each prompt that has none; None for no message."""
    fallback_models: ClassVar[Mapping[str, Any]] = {}
    """Engines by name that answer where no model of that name is given, such as a `Scripted` judge."""
    root_engine: str | None = None
    """The model role that plays in place of the policy, whose tokens are not trained; `reset` may set it."""
    root_trained: bool = True
    """Whether the model's own turns are trained, and not only those of sub-agents; `reset` may set it."""

    version: ClassVar[str | None] = None
    """The env's own version, such as "1.2", for what is measured on it; None for that of its package."""
    data_files: ClassVar[tuple[str, ...]] = ()
    """Files and folders beside the class's own file that its tasks are made of; they count in its content hash."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        check_made(cls.limits, Limits, f"{name}.limits", "`ag.Limits(...)`")
        check_made(cls.context, Compact | Window | None, f"{name}.context", "`ag.Compact(...)` or `ag.Window(...)`")
        check_made(cls.system, str | None, f"{name}.system", "text")
        check_made(cls.version, str | None, f"{name}.version", 'text, such as "1.2"')
        check_made(
            cls.fallback_models, Mapping, f"{name}.fallback_models", 'engines by name, such as {"judge": engine}'
        )
        check_made(cls.data_files, tuple, f"{name}.data_files", 'a tuple of names, such as ("words.txt",)')
        if cls.sandbox_spec is not None and not _is_spec(cls.sandbox_spec):
            check_made(cls.sandbox_spec, (), f"{name}.sandbox_spec", "a sandbox, such as `ag.AnySandbox()`")
        made: type = cls
        if not isinstance(inspect.getattr_static(made, "sandbox"), property):
            raise ValueError(
                f"{name}.sandbox: is the leased sandbox of a rollout; its kind is declared as `sandbox_spec = ...`"
            )
        check_settings(made, _SETTINGS)
        check_on_class(made, "tasks")
        check_read(made, "tools")
        for method in ("reset", "step", "score", "close", "branch", "group_reward"):
            check_awaited(made, method)
        check_opened(made, "open_resources")
        for method in ("interrupt", "restore_played"):
            if inspect.iscoroutinefunction(getattr(cls, method)):
                raise ValueError(f"{name}.{method}: it is not awaited; make it a plain `def`")
        asked = (("sandbox_for", "it is asked before there is an instance"), ("group_reward", "it sees many instances"))
        for method, why in asked:
            if not isinstance(vars(cls).get(method, getattr(Env, method)), classmethod | MethodType):
                raise ValueError(f"{name}.{method}: put @classmethod on it; {why}")
        if inspect.iscoroutinefunction(cls.sandbox_for):
            raise ValueError(f"{name}.sandbox_for: its answer is not awaited; make it a plain `def`")

    def __init__(self, task: TaskT) -> None:
        self.task = task
        self.metrics: dict[str, float] = {}
        """Numbers about this rollout by name; the log shows their means over a batch."""
        self.tool_failures: Counter[str] = Counter()
        """How often each tool's own code raised, timed out or returned something that is neither text nor JSON."""
        self.role_rewards: dict[str, float] = {}
        """The rewards of the roles that were given to sub-agents (`fork(role=...)`), by role."""
        self._sandbox: Sandbox | None = None
        self._models: Callable[[str], Model] | None = None
        self._forks: Callable[..., AbstractAsyncContextManager[ForkedAgent]] | None = None
        self._resources: Any = None
        self._threads = Threads(self)

    @classmethod
    def tasks(cls, split: Split) -> Sequence[TaskT]:
        """Return the tasks to train on ("train") or the held-out ones ("test"); the two must not overlap."""
        raise NotImplementedError(f"{cls.__name__}.tasks(split): override it, or pass tasks yourself")

    @classmethod
    def configured(cls, **arguments: Any) -> type[Self]:
        """Return this env with these values of its parameters (`ag.Parameter`), as a class of its own.

        :raises ValueError: for a parameter that it does not declare, or a value of another type; the message names it.
        """
        return configured(cls, arguments)

    @classmethod
    def sandbox_for(cls, task: TaskT) -> SandboxSpec | None:
        """Return the spec of the sandbox that this task's rollouts get, None for no sandbox; by default `sandbox_spec`.

        Override it if each task needs an image of its own, such as `ag.Docker(image=task.image)`. Equal specs share
        their sandboxes.
        """
        return cls.sandbox_spec

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of this rollout; EnvError if the class declares no `sandbox_spec`."""
        if self._sandbox is None:
            raise EnvError(
                f"{type(self).__name__} has no sandbox: declare `sandbox_spec = ag.AnySandbox()` in the class, or let "
                "`sandbox_for(task)` return one"
            )
        return self._sandbox

    @sandbox.setter
    def sandbox(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @classmethod
    def open_resources(cls) -> AbstractAsyncContextManager[Any]:
        """Open what all rollouts of this env share, such as a client or an index; `self.resources` is what it gives.

        Override it as a generator: `@classmethod`, below it `@asynccontextmanager`, `async def open_resources(cls)`
        with one `yield`. A run, an evaluation and `run_groups` open it once in each process and close it at their end,
        whatever happens.
        """
        return nullcontext()

    @property
    def resources(self) -> Any:
        """What `open_resources` opened for all rollouts; EnvError where it opens nothing.

        A class may say their type: `resources: Index`.
        """
        if self._resources is None:
            raise EnvError(
                f"{type(self).__name__} has no resources: override `open_resources`; where the env is made without a "
                "rollout, set `env.resources`"
            )
        return self._resources

    @resources.setter
    def resources(self, resources: Any) -> None:
        self._resources = resources

    @classmethod
    async def group_reward(
        cls, task: TaskT, rollouts: Sequence[Rollout], model: Callable[[str], Model]
    ) -> Sequence[float]:
        """Return what to add to the reward of each scored rollout of a task, when all of them have ended.

        It is for judges that compare rollouts: `model("judge")` is a model by its name, as `self.model` in a rollout.
        It may take `limits.seconds`, but for the time of models. What it raises leaves the group without rewards. A
        single `ag.rollout` has no group, and is not asked.
        """
        return [0.0] * len(rollouts)

    def model(self, name: str) -> Model:
        """Return a model that was given to the rollout by name, such as a judge: `await self.model("judge").ask(...)`.

        :raises EnvError: outside of a rollout, and where no model of that name was given; it says how to give one.
        """
        if self._models is None:
            raise EnvError(f"{type(self).__name__}.model: only inside a rollout, from `reset` on")
        return self._models(name)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas that the chat template shows to the model, in the OpenAI shape."""
        return []

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return the first messages and an info dict: by default the system message, if any, and the task's prompt.

        Draw from `seed` (0 to 2^31 - 1) alone. A group's rollouts share it; attempts of an evaluation each have one.
        """
        messages = [_copied(message) for message in self.task.prompt]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=self.system))
        return messages, {}

    async def step(self, action: Message) -> StepResult:
        """Answer the assistant's message with new messages, the reward of this turn, and whether the rollout ends.

        In the step that ends the rollout, `info["stop_reason"]` may say why, and `info["rewards"]` may give the outcome
        by name; then `score` is not called.
        """
        raise NotImplementedError(f"{type(self).__name__}.step(action)")

    async def score(self) -> dict[str, float]:
        """Return the outcome rewards by name; their sum is added to the rewards of the steps.

        In that sum the value of a method under `@ag.reward` counts by its weight, and any other one once.
        It is called once, when the rollout has ended, by itself or by a limit. It is not called where the last step
        gave the outcome in `info["rewards"]`.
        """
        return {}

    async def close(self) -> None:
        """Give back what the env opened; called once, also after an error or a cancellation.

        The plain tools and rewards of this rollout have ended by then. The exception is one inside a call of C that did
        not return within five seconds; the log names it.
        """

    def restore_played(self, rollout: Rollout) -> None:
        """Set what the rewards read to what it was at the end of this rollout, so that `agentgym rescore` can ask them.

        It is called on a new instance, with task, `answer`, `metrics` and `role_rewards` set; more is refused by name.
        """

    async def branch(self, memo: dict[int, Any]) -> Self:
        """Return a copy of this env as it is now, which plays a branch of the rollout (`ag.BranchingConfig`).

        By default it copies every attribute as `copy.deepcopy(value, memo)` does, where `memo` has what stands in the
        place of the sandbox, the task and the like. Override it where an attribute is refused, such as a connection.
        The runner gives the copy its sandbox, models and metrics, and closes it as any env.
        """
        return copied(self, memo)

    def interrupt(self) -> None:
        """End a call of C in which a plain tool or reward hangs, such as a query: `self.db.interrupt()`.

        It is called in the thread of the event loop when such a tool or reward is over its time limit or cancelled, and
        every five seconds while its thread goes on. It must return at once. Python code needs none: it is interrupted
        at its next step.
        """

    def fork(
        self,
        kind: ForkKind,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Callable[..., Any] | str] | None = None,
        sandbox: bool = False,
        turns: int | None = None,
        engine: str | None = None,
        train: bool | None = None,
        role: str | None = None,
    ) -> AbstractAsyncContextManager[ForkedAgent]:
        """Open a second conversation under this rollout's limits: `async with self.fork(...) as agent`.

        A "subagent" starts from `messages` alone, with `tools` (methods of this env, or their names; none by default).
        A "fork" goes on from this conversation as if it had been answered with `messages`; it keeps the tools, and the
        prefix that it shares with the parent is trained in the parent only. `sandbox=True` gives the agent a branch of
        the sandbox. `turns` limits the agent's own turns.

        A sub-agent with an `engine` is played by the model of that name, and never trained. `train=False` trains none
        of the agent's turns. With a `role` they are trained on that role's own reward, which `self.role_rewards` or
        methods under `@ag.reward(role=...)` give. What is None is as in the conversation that opens the agent.

        The agent's tools run on a shallow copy of this env: what they assign to `self` stays with the agent, what they
        change in place is shared.

        :raises EnvError: outside of a rollout.
        :raises ValueError: for an unknown kind or tool, `tools` or `engine` given to a fork, or `train=True` with an
            engine.
        """
        if self._forks is None:
            raise EnvError(f"{type(self).__name__}.fork: only inside a rollout, in a tool or in step()")
        if kind not in ("fork", "subagent"):
            raise ValueError(f"kind: {kind!r} is none of fork, subagent")
        if kind == "fork" and tools is not None:
            raise ValueError("tools: a fork keeps the tools of its parent; leave `tools` out, or open a 'subagent'")
        if kind == "fork" and engine is not None:
            raise ValueError("engine: a fork goes on in the ids of its parent; leave it out, or open a 'subagent'")
        names = None if kind == "fork" else [self._tool_name(given) for given in tools or ()]
        return self._forks(
            self, kind, messages, tools=names, sandbox=sandbox, turns=turns, engine=engine, train=train, role=role
        )

    def _tool_name(self, given: Callable[..., Any] | str) -> str:
        attribute = given if isinstance(given, str) else given.__name__
        for name, made in offered(self).items():
            if attribute in (name, getattr(made, "attribute", name)):
                return name
        raise ValueError(f"tools: {attribute!r} is no @tool of {type(self).__name__}: put @ag.tool on the method")


def has_group_reward(env: type[Env[Any]]) -> bool:
    """Whether an env compares the rollouts of a task (`Env.group_reward`)."""
    given: Any = env.group_reward
    own: Any = Env.group_reward
    return given.__func__ is not own.__func__


async def close(env: Env[Any]) -> None:
    """Close the env when its threads have ended, or after five seconds."""
    try:
        await threads_ended(env)
    finally:
        await env.close()


def _copied(message: Message) -> Message:
    """A copy of the message that shares nothing with it that can change; one of texts alone needs no deep copy."""
    if all(type(value) is str for value in message.values()):
        return message.copy()
    return deepcopy(message)


def _is_spec(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "open", None))


_SETTINGS: Mapping[str, Callable[[Any], bool]] = {
    "sandbox_spec": _is_spec,
    "limits": lambda value: isinstance(value, Limits),
    "context": lambda value: isinstance(value, Compact | Window),
    "system": lambda value: isinstance(value, str),
}
"""The settings of an env class, and what tells a value that each could have."""


def _is_env(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Env)

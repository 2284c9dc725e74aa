"""The base class of environments.

`Env` has Gymnasium's `reset`, `step` and `close` with Gymnasium's order of calls, but async. Most environments are a
`ToolEnv` (`tool_env.py`), whose methods are the model's tools and the rewards.
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
    """One attempt at one task: an instance is created for each rollout, closed afterwards, and never reused.

    If the class declares a sandbox, the runner sets `sandbox` before it calls `reset`. It calls `close` once,
    whatever happens, after the threads of plain tools and rewards have ended.

    Raises:
        ValueError: When a subclass is defined, if it declares something that can't work; the message names the
            attribute.
    """

    sandbox_spec: ClassVar[SandboxSpec | None] = None
    """The kind of sandbox that each rollout gets, such as `ag.AnySandbox()`; None for no sandbox."""
    limits: ClassVar[Limits] = Limits()
    """The turns, seconds and tokens that one rollout may use."""
    context: ClassVar[Compact | Window | None] = None
    """How a rollout continues when its context is full; None ends the rollout."""
    system: ClassVar[str | None] = None
    """The system message to add to each prompt that has none; None adds no message."""
    fallback_models: ClassVar[Mapping[str, Any]] = {}
    """Engines by model role, such as a `Scripted` judge, each used if the run names no model for the role."""
    root_engine: str | None = None
    """The model role that samples the first conversation, its forks and, by default, its sub-agents.

    With such a model, none of them is trained. None stands for the policy. `reset` may set it.
    """
    root_trained: bool = True
    """Whether to train the turns of the first conversation, and of forks by default; `reset` may set it."""

    version: ClassVar[str | None] = None
    """The env's own version, such as "1.2", recorded with its results; None uses the version of its package."""
    data_files: ClassVar[tuple[str, ...]] = ()
    """Names of files and folders next to the class's file that its tasks are made from; part of its content hash."""

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
                f"{name}.sandbox: this name is reserved for a rollout's leased sandbox; declare the kind of sandbox as "
                "`sandbox_spec = ...`"
            )
        check_settings(made, _SETTINGS)
        check_on_class(made, "tasks")
        check_read(made, "tools")
        for method in ("reset", "step", "step_cut", "score", "close", "branch", "group_reward"):
            check_awaited(made, method)
        check_opened(made, "open_resources")
        for method in ("interrupt", "restore_played"):
            if inspect.iscoroutinefunction(getattr(cls, method)):
                raise ValueError(f"{name}.{method} is called without `await`; make it a plain `def`")
        asked = (
            ("sandbox_for", "it is called before there is an instance"),
            ("group_reward", "it is called for many instances"),
        )
        for method, why in asked:
            if not isinstance(vars(cls).get(method, getattr(Env, method)), classmethod | MethodType):
                raise ValueError(f"{name}.{method}: put @classmethod on it; {why}")
        if inspect.iscoroutinefunction(cls.sandbox_for):
            raise ValueError(f"{name}.sandbox_for is called without `await`; make it a plain `def`")

    def __init__(self, task: TaskT) -> None:
        self.task = task
        self.metrics: dict[str, float] = {}
        """Numbers about this rollout by name; the log shows their means over a batch."""
        self.tool_failures: Counter[str] = Counter()
        """How often each tool's own code raised, timed out, or returned something that is neither text nor JSON."""
        self.role_rewards: dict[str, float] = {}
        """Rewards of roles by name; a role is given to a sub-agent with `fork(role=...)`."""
        self._sandbox: Sandbox | None = None
        self._models: Callable[[str], Model] | None = None
        self._forks: Callable[..., AbstractAsyncContextManager[ForkedAgent]] | None = None
        self._resources: Any = None
        self._threads = Threads(self)

    @classmethod
    def tasks(cls, split: Split) -> Sequence[TaskT]:
        """Return the tasks of a split; the two splits must have no task in common.

        Args:
            split: "train" for the tasks to train on, "test" for the held-out ones.
        """
        raise NotImplementedError(f"{cls.__name__}.tasks(split) is not implemented; override it, or pass tasks")

    @classmethod
    def configured(cls, **arguments: Any) -> type[Self]:
        """Return a subclass of this env with these values of its parameters (`ag.Parameter`).

        Args:
            arguments: Values by parameter name.

        Raises:
            ValueError: If a parameter isn't declared, or a value has the wrong type; the message names it.
        """
        return configured(cls, arguments)

    @classmethod
    def sandbox_for(cls, task: TaskT) -> SandboxSpec | None:
        """Return the spec of the sandbox for this task's rollouts, or None for no sandbox; by default `sandbox_spec`.

        Override it if each task needs a different image, such as `ag.Docker(image=task.image)`. Equal specs share their
        sandboxes.

        Args:
            task: The task of the rollout.
        """
        return cls.sandbox_spec

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of this rollout; raises EnvError if the class declares no `sandbox_spec`."""
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
        """Open the resources that all rollouts of this env share, such as a client or an index.

        During a rollout, `self.resources` is the value that this method yields.

        Override it as a generator with one `yield`: write `@classmethod`, then `@asynccontextmanager`, then `async def
        open_resources(cls)`. Runs, evaluations and `run_groups` open the resources once per process, and always close
        them at their end, even after an error.
        """
        return nullcontext()

    @property
    def resources(self) -> Any:
        """The value that `open_resources` yielded for all rollouts; raises EnvError if the env opens no resources.

        A class may annotate the type: `resources: Index`.
        """
        if self._resources is None:
            raise EnvError(
                f"{type(self).__name__} has no resources: override `open_resources`; if you create the env without a "
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
        """Return one number for each scored rollout, which is added to its reward.

        It is called once all rollouts of a task have ended, and is meant for judges that compare them. It may take up
        to `limits.seconds`, not counting the time of model calls. If it raises, the whole group has no rewards. It
        isn't called for a single `ag.rollout`, which has no group.

        Args:
            task: The task of the group.
            rollouts: The task's scored rollouts.
            model: Returns a model by its name, such as `model("judge")`, like `self.model` in a rollout.

        Returns:
            One number for each rollout, in the same order.
        """
        return [0.0] * len(rollouts)

    def model(self, name: str) -> Model:
        """Return a model that was given to the rollout by name, such as a judge: `await self.model("judge").ask(...)`.

        Args:
            name: The model's name.

        Raises:
            EnvError: If called outside of a rollout, or if no model of that name was given; the message says how to
                give one.
        """
        if self._models is None:
            raise EnvError(f"{type(self).__name__}.model is only available inside a rollout, from `reset` on")
        return self._models(name)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool schemas that the chat template shows to the model, in OpenAI's format."""
        return []

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Return the first messages and an info dict: by default the system message, if any, and the task's prompt.

        Args:
            seed: The only source of randomness that an env should use, from 0 to 2^31 - 1. A group's rollouts share it;
                each attempt of an evaluation has a different one.
            options: Gymnasium's options; agentgym's own runs pass none.
        """
        messages = [_copied(message) for message in self.task.prompt]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=self.system))
        return messages, {}

    async def step(self, action: Message) -> StepResult:
        """Return the response to the assistant's message: messages, the turn's reward, and whether the rollout ends.

        In the step that ends the rollout, `info["stop_reason"]` may contain the reason. `info["rewards"]` may contain
        the outcome rewards by name, in which case `score` isn't called.

        Args:
            action: The assistant's message.
        """
        raise NotImplementedError(f"{type(self).__name__}.step(action)")

    async def step_cut(self, action: Message) -> StepResult | None:
        """Take the last turn of a rollout that a token limit cut off, so that it is scored on the text that it has.

        It is called instead of `step`. By default it calls `step`. Override it to return None if a turn that is cut off
        must not count, such as a move in a game.

        Args:
            action: The assistant's message as far as it was sampled, without its tool calls, which are never made.

        Returns:
            A result as of `step`, of which only the rewards count; the rollout ends in any case, and its stop reason is
            the limit. None leaves the turn out.
        """
        return await self.step(action)

    async def score(self) -> dict[str, float]:
        """Return the outcome rewards by name; their sum is added to the rewards of the steps.

        In that sum, the value of an `@ag.reward` method is multiplied by its weight, and any other value counts once.
        `score` is called once, after the rollout has ended or reached a limit, unless the last step returned the
        outcome in `info["rewards"]`.
        """
        return {}

    async def close(self) -> None:
        """Release the env's resources; called once, even after an error or a cancellation.

        By then, all plain `def` tools and rewards of this rollout, which run in threads, have returned. The exception
        is one that was still inside a C call after five seconds; the log names it.
        """

    def restore_played(self, rollout: Rollout) -> None:
        """Restore the state that the rewards read, as it was when the rollout ended, for `agentgym rescore`.

        It is called on a new instance whose task, `answer`, `metrics` and `role_rewards` are set. If the rewards read
        more than these and the env doesn't override this method, rescoring raises an error that names the missing
        attribute.

        Args:
            rollout: The stored rollout.
        """

    async def branch(self, memo: dict[int, Any]) -> Self:
        """Return a copy of this env in its current state, to play a branch of the rollout (`ag.BranchingConfig`).

        By default it copies every attribute with `copy.deepcopy(value, memo)`. Override it if an attribute can't be
        copied, such as a connection. The runner sets the copy's sandbox, models and metrics, and closes it like any
        env.

        Args:
            memo: A memo for `copy.deepcopy`, with replacements for objects that must not be copied, such as the sandbox
                and the task.
        """
        return copied(self, memo)

    def interrupt(self) -> None:
        """Interrupt a C call in which a plain tool or reward hangs, for example with `self.db.interrupt()`.

        It is called in the event loop's thread when such a tool or reward exceeds its time limit or is cancelled, and
        then every five seconds while its thread keeps running. It must return immediately. Pure Python code doesn't
        need this method, because agentgym interrupts it at its next step.
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

        The agent's tools run on a shallow copy of this env: attributes that they assign on `self` stay with the agent,
        and objects that they change in place are shared.

        Args:
            kind: A "subagent" starts from `messages` alone. A "fork" continues this conversation as if `messages` had
                been the response; it keeps the tools, and the prefix that it shares with its parent is trained only in
                the parent.
            messages: The first messages of a sub-agent, or the response in a fork.
            tools: Methods of this env, or their names, as a sub-agent's tools; None for no tools.
            sandbox: Whether the agent gets a branch of the sandbox.
            turns: Limit on the agent's own turns; None for no extra limit.
            engine: Name of the model role that plays a sub-agent, whose turns are then never trained. None uses the
                parent conversation's model.
            train: Whether to train the agent's turns. None uses the parent conversation's setting.
            role: Role on whose reward the agent's turns are trained; set that reward in `self.role_rewards` or with
                `@ag.reward(role=...)` methods. None uses the parent conversation's role.

        Raises:
            EnvError: If called outside of a rollout.
            ValueError: If the kind or a tool is unknown, if `tools` or `engine` is given to a fork, or if `train=True`
                is combined with an engine.
        """
        if self._forks is None:
            raise EnvError(f"{type(self).__name__}.fork is only available inside a rollout, in a tool or in step()")
        if kind not in ("fork", "subagent"):
            raise ValueError(f"kind: expected 'fork' or 'subagent', got {kind!r}")
        if kind == "fork" and tools is not None:
            raise ValueError("tools: a fork keeps the tools of its parent; leave `tools` out, or open a 'subagent'")
        if kind == "fork" and engine is not None:
            raise ValueError(
                "engine: a fork continues its parent's token ids; leave `engine` out, or open a 'subagent'"
            )
        names = None if kind == "fork" else [self._tool_name(given) for given in tools or ()]
        return self._forks(
            self, kind, messages, tools=names, sandbox=sandbox, turns=turns, engine=engine, train=train, role=role
        )

    def _tool_name(self, given: Callable[..., Any] | str) -> str:
        attribute = given if isinstance(given, str) else given.__name__
        for name, made in offered(self).items():
            if attribute in (name, getattr(made, "attribute", name)):
                return name
        raise ValueError(
            f"tools: {attribute!r} is not an @ag.tool of {type(self).__name__}; put @ag.tool on the method"
        )


def has_group_reward(env: type[Env[Any]]) -> bool:
    """Return whether an env class overrides `Env.group_reward`."""
    given: Any = env.group_reward
    own: Any = Env.group_reward
    return given.__func__ is not own.__func__


async def close(env: Env[Any]) -> None:
    """Close the env once its threads have ended, or after at most five seconds."""
    try:
        await threads_ended(env)
    finally:
        await env.close()


def _copied(message: Message) -> Message:
    """Return an independent copy of the message, without a deep copy if it contains only text."""
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
"""Settings whose misspelled names are detected, each with a function that tests whether a value is valid for it."""


def _is_env(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Env)

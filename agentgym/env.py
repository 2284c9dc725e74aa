"""Environments: one class, one instance a rollout.

`Env` is the lower floor, with Gymnasium's words in Gymnasium's order, asynchronously. `ToolEnv` is the
one most people write: typed methods are the tools, other methods are the rewards.
"""

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar, overload

from agentgym.declarations import check_free, check_made, check_number, check_reward, check_target, check_whole, marked
from agentgym.errors import EnvError, boundary
from agentgym.scoring import reward_value
from agentgym.threads import Threads
from agentgym.tools import ToolResult, declared, dispatch, tools_of
from agentgym.types import Box, Message, Sandbox, StepResult, StopReason, Task, ToolCall

TaskT = TypeVar("TaskT", bound=Task)
EnvT = TypeVar("EnvT", bound="type[Env[Any]]")
F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

Split = Literal["train", "test"]
ForkKind: TypeAlias = Literal["fork", "subagent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rollout may use, its forks and sub-agents included; past any of these it is truncated and scored."""

    turns: int = 20
    """Turns of the policy, summaries not counted."""
    seconds: float = 600.0
    """From the first prompt to the last answer; scoring may take as long again."""
    context_tokens: int = 8192
    """Ids in one segment, prompt and answers together."""
    turn_tokens: int = 1024
    """Ids in one turn; clamped to what is left of the context."""
    tokens: int | None = None
    """Sampled ids in all; None for no limit but those of turns and context."""
    retries: int = 0
    """Fresh attempts after a failure of engine or box, as long as no action has reached the env."""

    def __post_init__(self) -> None:
        for name in ("turns", "context_tokens", "turn_tokens", "tokens", "retries"):
            check_whole(name, getattr(self, name), may_be_none=name == "tokens")
        check_number("seconds", self.seconds)
        for name in ("turns", "seconds", "context_tokens", "turn_tokens", "tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: must be positive, got {value}")
        if self.retries < 0:
            raise ValueError(f"retries: must not be negative, got {self.retries}")


Keep: TypeAlias = Callable[[Sequence[Message], Sequence[Message], str], list[Message]]
"""What the next segment starts from, given the first prompt, what came after it, and the model's summary."""


@dataclass(frozen=True, slots=True)
class KeepPrompt:
    """Keep the first prompt, with the summary behind its last user message."""

    def __call__(self, first: Sequence[Message], since: Sequence[Message], summary: str) -> list[Message]:
        *before, last = first
        if last["role"] != "user":
            return [*first, Message(role="user", content=summary)]
        return [*before, Message(role="user", content=f"{last['content']}\n{summary}")]


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the first prompt and summary, and the last `turns` turns as they were, with their answers."""

    turns: int

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns: must be at least 1, got {self.turns}")

    def __call__(self, first: Sequence[Message], since: Sequence[Message], summary: str) -> list[Message]:
        return [*KeepPrompt()(first, since, summary), *last_turns(since, self.turns)]


def last_turns(messages: Sequence[Message], turns: int) -> list[Message]:
    """The last `turns` assistant messages, each with what follows it."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-turns:]
    return list(messages[starts[0] :]) if starts else []


def _check_trigger(at: float | None, turns: int | None) -> None:
    if at is None and turns is None:
        raise ValueError("at: give `at`, `turns` or both; leave `context` out of the env for neither")
    if at is not None and not 0 < at < 1:
        raise ValueError(f"at: must lie between 0 and 1, got {at}")
    if turns is not None and turns < 1:
        raise ValueError(f"turns: must be at least 1, got {turns}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Compaction: the model summarises, and the next segment starts from what `keep` makes of that.

    The summary is sampled and trained like any other turn. It is asked for when the segment holds `at` of
    the context, or after every `turns` turns, whichever comes first.
    """

    at: float | None = 0.8
    turns: int | None = None
    instruction: str = "Summarise what you found and what is left to do; the conversation above will be removed."
    keep: Keep = KeepPrompt()

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window: the next segment starts from the first prompt and the last `keep` turns, without a summary.

    The window slides when the segment holds `at` of the context, or after every `turns` turns, whichever comes first.
    What is carried over was trained where it was sampled, and is only read here.
    """

    at: float | None = 0.8
    turns: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)
        if self.keep < 1:
            raise ValueError(f"keep: must be at least 1, got {self.keep}")
        if self.turns is not None and self.keep >= self.turns:
            raise ValueError(f"keep: must be less than turns, got {self.keep} of {self.turns}")


class Kid(Protocol):
    """A fork or a sub-agent of a running rollout: a conversation of its own, under the same limits.

    Its turns are trained with the rollout's one reward; where a limit ends it, `stop_reason` says which.
    """

    stop_reason: str | None

    @property
    def env(self) -> "Env[Any]":
        """The copy of the env that its tools run on: `env.box` is its own where it was forked with one."""
        ...

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, prompt included."""
        ...

    async def run(self) -> str:
        """Let it play, tool calls and all, until it answers without a call or a tool stops it; the text.

        "" where a limit ended it first.
        """
        ...

    async def turn(self) -> Message | None:
        """One assistant message; None where a limit ended it."""
        ...

    def tell(self, messages: Sequence[Message]) -> None:
        """Answer its last turn; an overflowing answer is cut, and the next `turn` is None."""
        ...


class Forks(Protocol):
    """What a runner gives an env so that it can fork."""

    def fork(
        self,
        env: "Env[Any]",
        kind: "ForkKind",
        messages: Sequence[Message],
        *,
        tools: Sequence[str] | None,
        box: bool,
        turns: int | None,
    ) -> AbstractAsyncContextManager[Kid]:
        """A kid of the conversation this belongs to."""
        ...


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
        self._forks: Forks | None = None
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
    ) -> AbstractAsyncContextManager[Kid]:
        """A second conversation under this rollout, its limits and its reward: `async with self.fork(..) as kid`.

        A "subagent" starts from `messages` alone, with `tools` (methods of this env, none by default). A "fork" goes
        on from this conversation as if it had been answered with `messages`; it keeps the tools, and its shared
        prefix is trained in the parent only. With `box` it has a branch of the box. `turns` is a limit of its own.

        The kid's tools run on a shallow copy of this env: what they assign to `self` stays with the kid, what they
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


@dataclass(frozen=True, slots=True)
class _RewardMark:
    weight: float


@overload
def reward(function: F) -> F: ...
@overload
def reward(*, weight: float = ...) -> Callable[[F], F]: ...
def reward(function: Callable[..., Any] | None = None, *, weight: float = 1.0) -> Callable[..., Any]:
    """Score the finished rollout with a method, async or plain; the rollout's reward is the weighted sum.

    A plain one runs in a thread of its own, as a plain tool does, and never blocks the loop.
    """
    check_number("weight", weight)

    def mark(target: F) -> F:
        check_target(target, "@ag.reward", "write `@ag.reward`, or `@ag.reward(weight=0.5)`")
        target.__agentgym_reward__ = _RewardMark(weight)  # type: ignore[attr-defined]
        return target

    return mark(function) if function is not None else mark


@cache
def rewards_of(owner: type) -> dict[str, float]:
    """The weight of each `@reward` method of a class and its bases, by name."""
    return {name: mark.weight for name, mark in marked(owner, "__agentgym_reward__", "@ag.reward")}


class ToolEnv(Env[TaskT]):
    """An env whose `@tool` methods are the model's tools and whose `@reward` methods score the end.

    It ends when the model answers without a call (`self.answer` holds the text) or a tool returns `Stop`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        made: type = cls
        for attribute, name, _ in declared(made):
            check_free(attribute, _TAKEN, f"tool {name!r} of {cls.__name__}", f', as in `@ag.tool(name="{name}")`')
        for name in rewards_of(made):
            check_free(name, _TAKEN, f"reward {name!r} of {cls.__name__}", "")
            check_reward(getattr(cls, name), f"reward {name!r} of {cls.__name__}")

    def __init__(self, task: TaskT) -> None:
        super().__init__(task)
        cls: type = type(self)
        _warn_of_no_reward(cls)
        self.answer: str | None = None
        self.metrics |= {"tool_calls": 0.0, "tool_errors": 0.0, "malformed_calls": 0.0}

    async def setup(self) -> None:
        """Prepare the box or anything else, before the first prompt is shown."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        cls: type = type(self)
        return [made.schema for made in tools_of(cls).values()]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        with boundary(EnvError, f"{type(self).__name__}.setup"):
            await self.setup()
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> StepResult:
        calls = action.get("tool_calls")
        if not calls:
            self.answer = action["content"]
            return _end([], StopReason.ANSWER)
        messages, stop = await self.obey(calls)
        if stop is not None:
            return _end(messages, stop)
        return StepResult(messages, 0.0, False, False, {})

    async def obey(
        self, calls: Sequence[ToolCall], offered: Collection[str] | None = None
    ) -> tuple[list[Message], str | None]:
        """Make the calls one after the other; their tool messages, and the reason where one of them stopped it.

        `offered` names the tools there are for this caller; None for all.
        """
        messages: list[Message] = []
        for call in calls:
            result = await self._run(call, offered)
            messages.append(_tool_message(call, result))
            if result.stop is not None:
                return messages, result.stop
        return messages, None

    async def score(self) -> dict[str, float]:
        """Every `@reward` method's value times its weight, by name; EnvError names one that has no value."""
        cls: type = type(self)
        return {
            name: weight * await reward_value(getattr(self, name), f"{cls.__name__}: reward {name!r}", self._threads)
            for name, weight in rewards_of(cls).items()
        }

    async def _run(self, call: ToolCall, offered: Collection[str] | None) -> ToolResult:
        function = call["function"]
        result = await dispatch(self, function["name"], function["arguments"], offered=offered)
        self.metrics["tool_calls"] += not result.malformed
        self.metrics["tool_errors"] += result.error
        if result.error and not result.malformed:  # of a malformed call the name is the model's invention
            name = f"tool_errors/{function['name']}"
            self.metrics[name] = self.metrics.get(name, 0.0) + 1
        self.metrics["malformed_calls"] += result.malformed
        if result.failed:
            self.tool_failures[function["name"]] += 1
        return result


def _end(messages: list[Message], reason: str) -> StepResult:
    """The rollout ends here; whoever plays it asks for the score."""
    return StepResult(messages, 0.0, True, False, {"stop_reason": reason})


def _tool_message(call: ToolCall, result: ToolResult) -> Message:
    message = Message(role="tool", content=result.content, name=call["function"]["name"])
    if "id" in call:
        message["tool_call_id"] = call["id"]
    return message


@cache
def _warn_of_no_reward(cls: type) -> None:
    scored = [getattr(cls, name) is not getattr(ToolEnv, name) for name in ("score", "step")]
    if not rewards_of(cls) and not any(scored):
        said = "has no @ag.reward and overrides neither score nor step: every rollout is worth 0.0"
        log.warning("%s %s", cls.__name__, said)


_TAKEN = frozenset({*dir(ToolEnv), "task", "metrics", "answer", "tool_failures", "_box", "_forks", "_threads"})
"""What a tool or a reward may not be called: it would hide, or be hidden by, what Env and ToolEnv use."""


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


_registry: dict[str, type[Env[Any]]] = {}


def register(name: str) -> Callable[[EnvT], EnvT]:
    """Make an env class known by name; two classes of one name are an error."""
    if not isinstance(name, str):
        raise TypeError(f'register: needs a name, write `@ag.register("name")`; got {name!r}')

    def enter(cls: EnvT) -> EnvT:
        if not _is_env(cls):
            raise TypeError(f"register: {name!r} marks an env class, got {cls!r}")
        known = _registry.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"register: {name!r} is already {known.__module__}.{known.__qualname__}")
        _registry[name] = cls
        return cls

    return enter


def registered() -> Iterator[tuple[str, type[Env[Any]]]]:
    """The envs that the imported modules registered, by name."""
    yield from sorted(_registry.items())


def find_env(env: "str | type[Env[Any]]") -> type[Env[Any]]:
    """The env class of a registered name or of "package.module:Class"; ValueError says what is known."""
    if not isinstance(env, str):
        if not _is_env(env):
            raise ValueError(f"env: must be a class of Env or its name, got {env!r:.200}; pass the class itself")
        return env
    if env in _registry:
        return _registry[env]
    module, colon, attribute = env.partition(":")
    if not colon:
        known = ", ".join(sorted(_registry)) or "none"
        raise ValueError(f"env: {env!r} is not registered (known: {known}); import its module or write 'module:Class'")
    with boundary(EnvError, f"env {env!r}"):
        found = getattr(importlib.import_module(module), attribute)
    if not _is_env(found):
        raise ValueError(f"env: {env!r} is no Env class")
    made: type[Env[Any]] = found
    return made


def _is_env(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Env)

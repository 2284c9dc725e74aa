"""Observation of running envs: their messages, their scores, and where they waited."""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agentgym.environments.env import Env
from agentgym.environments.parameters import variant
from agentgym.environments.rewards import rewards_of
from agentgym.errors import alone
from agentgym.errors.tracebacks import describe
from agentgym.testing.env_checks.spoiled import Hostile, score_of_each
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout
from agentgym.types.task import StepResult

T = TypeVar("T")

RESET, SCORE = -1, -2
"""Values used instead of a turn's number, for the parts of a rollout that belong to no turn."""


@dataclass(slots=True)
class Turn:
    """One assistant message and the env's response."""

    action: Message
    messages: list[Message] = field(default_factory=list)
    over: bool = False
    """Whether the rollout ended with this turn."""
    waited_in: str | None = None
    """The name, for messages, of the first method or tool that waited in this turn; None if none did."""


@dataclass(slots=True)
class ObservedRollout:
    """What the check changes in one rollout, and what it observes of it."""

    cancel_in: int | None = None
    """The turn, or RESET or SCORE, at whose first wait the rollout is cancelled; None to let it run."""
    score_twice: bool = False
    """Whether the env computes its score a second time."""
    hostile: Hostile | None = None
    """The content that replaces the model's text and the sandbox's content in this rollout."""
    prompt: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    bad_rewards: dict[str, str] = field(default_factory=dict)
    changed_scores: list[str] = field(default_factory=list)
    second_score_failed: str | None = None
    """The error of computing the second score; None if there was none."""
    waited_in_reset: bool = False
    waited_in_score: str | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ended_as_cancelled: bool = False
    swallowed_by: str | None = None
    closed: int = 0
    rewards_running: list[str] = field(default_factory=list)
    rollout: Rollout | None = None
    error: str | None = None

    @property
    def reward(self) -> float | None:
        """The rollout's reward; None if it failed."""
        return None if self.rollout is None else self.rollout.reward

    def first_wait(self, where: str, turn: int) -> None:
        """Record that a method or tool waits for the first time. If `turn` is `cancel_in`, cancel the rollout.

        Args:
            where: The name of the method or tools, for messages.
            turn: The number of the turn, or RESET or SCORE.
        """
        running = asyncio.current_task()
        if turn == RESET:
            self.waited_in_reset = True
        elif turn == SCORE:
            self.waited_in_score = where
        else:
            self.turns[turn].waited_in = where
        if self.cancel_in == turn and running is not None and not self.cancelled.is_set():
            self.cancelled.set()
            running.cancel()

    def went_on(self, where: str) -> None:
        """Check, after a method or tool has returned, that it didn't swallow the check's cancellation.

        Args:
            where: The name of the method or tools, for messages.

        Raises:
            CancelledError: If the check has cancelled the rollout; `where` is recorded as the code that swallowed it.
        """
        if self.cancelled.is_set():
            self.swallowed_by = where
            raise asyncio.CancelledError

    def note(self, playing: "asyncio.Task[Rollout]") -> None:
        """Record how the rollout ended."""
        self.ended_as_cancelled = playing.done() and playing.cancelled()
        if not playing.done() or playing.cancelled():
            return
        error = playing.exception()
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
        else:
            self.rollout = playing.result()
            self.error = self.rollout.error


class FirstWait(Generic[T]):
    """An awaitable that awaits `work` and calls `on_wait` when the work waits for the first time."""

    def __init__(self, work: Awaitable[T], on_wait: Callable[[], None]) -> None:
        self.work, self.on_wait = work, on_wait

    def __await__(self) -> Generator[Any, Any, T]:
        steps: Any = self.work.__await__()
        try:
            waits_for = next(steps)
            self.on_wait()
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = steps.throw(error)
                else:
                    waits_for = steps.send(sent)
        except StopIteration as done:
            result: T = done.value
            return result


class Watching(Protocol):
    """Receives the actions of an observed env."""

    play: ObservedRollout
    offers_tools: bool

    def read(self, messages: Any) -> list[Message]:
        """Return the messages with contents in stored form: text, or a list of parts if there is an image."""
        ...


def observed_class(cls: type[Env[Any]], stage: Watching) -> type[Env[Any]]:
    """Return a subclass with the same name that reports all its actions to `stage`."""

    async def reset(self: Any, *, seed: int | None = None, options: Any = None) -> Any:
        play, where = stage.play, "reset() or setup()"
        made = await FirstWait(cls.reset(self, seed=seed, options=options), lambda: play.first_wait(where, RESET))
        play.went_on(where)
        if isinstance(made, tuple) and made:
            play.prompt = stage.read(made[0])
        stage.offers_tools = bool(self.tools)
        return made

    async def step(self: Any, action: Message) -> StepResult:
        play = stage.play
        action = action if play.hostile is None else play.hostile.said(action)
        play.turns.append(Turn(action))
        number = len(play.turns) - 1
        result = await FirstWait(cls.step(self, action), lambda: play.first_wait(_where(play), number))
        play.went_on(play.turns[-1].waited_in or "step()")
        if isinstance(result, tuple) and len(result) == 5:  # The rollout rejects anything else.
            play.turns[-1].messages = stage.read(result[0])
            play.turns[-1].over = bool(result[2] or result[3])
            if not play.bad_rewards:
                _check_value(play, "step()", result[1])
        return result

    async def score(self: Any) -> dict[str, float]:
        play, models = stage.play, self._models
        if play.hostile is not None:
            return await score_of_each(play.hostile, self, lambda: cls.score(self))
        asked = models.calls() if models is not None else {}
        first = await FirstWait(cls.score(self), lambda: play.first_wait(_where_of_score(play), SCORE))
        play.went_on(_where_of_score(play))
        if play.score_twice and not play.bad_rewards:
            play.score_twice = False
            if models is not None:
                models.rewind(asked)  # The limit on a judge's calls is for one score.
            try:
                play.changed_scores = _differing(first, await cls.score(self))
            except Exception as error:
                play.second_score_failed = describe(alone(error))
        return first

    async def close(self: Any) -> None:
        stage.play.closed += 1
        await cls.close(self)

    body: dict[str, Any] = {"reset": reset, "step": step, "score": score, "close": close}
    owner: type = cls
    body |= {name: value for name in rewards_of(owner) for value in _observed_reward(cls, name, stage)}
    return variant(cls, body)


def _where_of_score(play: ObservedRollout) -> str:
    """Return the name, for messages, of the reward method that is running, or "score()"."""
    return f"reward {play.rewards_running[-1]!r}" if play.rewards_running else "score()"


def _where(play: ObservedRollout) -> str:
    """Return the name, for messages, of the method or the tools that are running in this turn."""
    if play.rewards_running:
        return _where_of_score(play)
    named = [call["function"]["name"] for call in play.turns[-1].action.get("tool_calls", ())]
    return f"tool {', '.join(map(repr, named))}" if named else "step()"


def _observed_reward(cls: type[Env[Any]], name: str, stage: Watching) -> Iterator[Any]:
    """Yield the reward method, wrapped to report its return value; nothing if it isn't a function."""
    function = inspect.getattr_static(cls, name)
    if not inspect.isfunction(function):
        return

    @functools.wraps(function)
    async def scored(self: Any) -> Any:
        with _running(stage.play, name):
            value = await function(self)
        _check_value(stage.play, name, value)
        return value

    @functools.wraps(function)
    def scored_at_once(self: Any) -> Any:
        value = function(self)
        if not inspect.isawaitable(value):
            _check_value(stage.play, name, value)
        return value

    yield scored if inspect.iscoroutinefunction(function) else scored_at_once


@contextmanager
def _running(play: ObservedRollout, name: str) -> Iterator[None]:
    play.rewards_running.append(name)
    try:
        yield
    finally:
        play.rewards_running.remove(name)


def _check_value(play: ObservedRollout, name: str, value: Any) -> None:
    """Record a reward that isn't a finite number."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        play.bad_rewards.setdefault(name, f"returned {value!r:.80}")


def _differing(first: dict[str, float], second: dict[str, float]) -> list[str]:
    names = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    return [f"{name!r} was {a!r} and then {b!r}" for name, (a, b) in names.items() if a != b]

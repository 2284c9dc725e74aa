"""Observed rollouts of an env: what it said, how it scored, what it waited for."""

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agentgym.boxes import Boxes
from agentgym.engines.base import Engine
from agentgym.engines.scripted import Reply, Scripted, Seeing
from agentgym.environments.env import Env
from agentgym.environments.rewards import rewards_of
from agentgym.errors import EngineError, alone
from agentgym.failures import describe
from agentgym.messages import Message, first_image, kept_message
from agentgym.rollouts.rollout import rollout
from agentgym.types import Completion, Rollout, StepResult

T = TypeVar("T")

RESET, SCORE = -1, -2
"""Stand-ins for a turn's number: the parts of a rollout that belong to no turn."""
CANCEL_GRACE_S = 30.0
"""Most seconds that a cancelled rollout may take to close."""
_NAMED = "check_env-"
"""How the last part of the id of a check's own rollout begins."""


def is_of_check(rollout_id: str) -> bool:
    """Whether a check of an env played the rollout for itself."""
    return rollout_id.rpartition("/")[2].startswith(_NAMED)


@dataclass(slots=True)
class Turn:
    """One assistant message and what the env answered."""

    action: Message
    messages: list[Message] = field(default_factory=list)
    over: bool = False
    """Whether the rollout ended with this turn."""
    waited_in: str | None = None
    """The name of the code that first waited in this turn; None where nothing did."""


@dataclass(slots=True)
class ObservedRollout:
    """One observed rollout."""

    cancel_in: int | None = None
    """The turn, or RESET or SCORE, at whose first wait the rollout is cancelled; None to let it play."""
    score_twice: bool = False
    """Whether the env is asked for its score a second time."""
    prompt: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    bad_rewards: dict[str, str] = field(default_factory=dict)
    changed_scores: list[str] = field(default_factory=list)
    second_score_failed: str | None = None
    """The error of the second time that the env was asked for its score."""
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
        """The rollout's reward; None where it failed."""
        return None if self.rollout is None else self.rollout.reward

    def first_wait(self, where: str, turn: int) -> None:
        """Note that the code of this turn waits for the first time; cancel the rollout where that was asked for."""
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
        """Note that the code returned; where it had been cancelled, it swallowed the cancellation."""
        if self.cancelled.is_set():
            self.swallowed_by = where
            raise asyncio.CancelledError

    def note(self, playing: "asyncio.Task[Rollout]") -> None:
        """Note how the rollout ended."""
        self.ended_as_cancelled = playing.done() and playing.cancelled()
        if not playing.done() or playing.cancelled():
            return
        error = playing.exception()
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
        else:
            self.rollout = playing.result()
            self.error = self.rollout.error


class Repeating(Scripted):
    """An engine that repeats the last reply of its script for as long as the env asks."""

    def _next(self, token_ids: Sequence[int], session: str) -> Reply:
        played = self._played.get(session.rpartition("/")[0], 0)
        if not callable(self.replies) and played >= len(self.replies):
            return self.replies[-1]
        return super()._next(token_ids, session)


class Once(Scripted):
    """An engine of one reply; asked for a second one, it notes that the rollout went on, and ends it."""

    went_on = False

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        if self._played:
            self.went_on = True
            raise EngineError("the check has seen enough")
        return await super().generate(*args, **kwargs)


class Waiting(Scripted):
    """An engine that never answers."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked = asyncio.Event()

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


class Stage:
    """Plays rollouts of one env class in turn, and observes each."""

    def __init__(
        self,
        cls: type[Env[Any]],
        task: Any,
        boxes: Boxes | None,
        models: Mapping[str, Engine] | None = None,
        *,
        sees: bool = False,
    ) -> None:
        self.task, self.boxes, self.models, self.sees = task, boxes, models, sees
        self.shows_images = False
        """Whether the env has shown an image to a model."""
        self.play = ObservedRollout()
        self.cls = _observed(cls, self)
        self.offers_tools = False
        """Whether the env of the last play showed tools to the model."""

    async def run(
        self, name: str, engine: Scripted, *, cancel_in: int | None = None, score_twice: bool = False
    ) -> ObservedRollout:
        """Play one rollout to its end; whatever it raises is in `error` of what is returned. Its id has `name`."""
        play = self.play = ObservedRollout(cancel_in=cancel_in, score_twice=score_twice)
        playing = self._begin(name, engine)
        cancelled = asyncio.create_task(play.cancelled.wait())
        try:
            await asyncio.wait({playing, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({playing}, timeout=CANCEL_GRACE_S if play.cancelled.is_set() else None)
            play.note(playing)
        finally:
            await _stop(cancelled)
            await _stop(playing)
        return play

    async def cancel_while_sampling(self) -> ObservedRollout:
        """Play a rollout and cancel it while it waits for the engine."""
        play, engine = ObservedRollout(), Waiting()
        self.play = play
        playing = self._begin("cancelled", engine)
        asked = asyncio.create_task(engine.asked.wait())
        await asyncio.wait({playing, asked}, return_when=asyncio.FIRST_COMPLETED)
        await _stop(asked)
        await _stop(playing)
        play.note(playing)
        return play

    def _begin(self, name: str, engine: Scripted) -> "asyncio.Task[Rollout]":
        named = f"{self.task.id}/{_NAMED}{name}"
        asked: Engine = Seeing(engine) if self.sees else engine
        playing = rollout(self.cls, self.task, asked, boxes=self.boxes, seed=7, rollout_id=named, models=self.models)
        return asyncio.create_task(playing)

    def read(self, messages: Any) -> list[Message]:
        """Return the messages with their contents as they are kept, as they were given where that is not possible."""
        try:
            kept = [kept_message(message, "") for message in messages]
        except (ValueError, AttributeError):  # The rollout refuses them.
            return list(messages)
        self.shows_images |= first_image(kept) is not None
        return kept


async def _stop(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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


def _observed(cls: type[Env[Any]], stage: Stage) -> type[Env[Any]]:
    """Return a subclass of the same name that reports all that happens to the stage."""

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
        play.turns.append(Turn(action))
        number = len(play.turns) - 1
        result = await FirstWait(cls.step(self, action), lambda: play.first_wait(_where(play), number))
        play.went_on(play.turns[-1].waited_in or "step()")
        if isinstance(result, tuple) and len(result) == 5:  # The rollout refuses anything else.
            play.turns[-1].messages = stage.read(result[0])
            play.turns[-1].over = bool(result[2] or result[3])
            if not play.bad_rewards:
                _check_value(play, "step()", result[1])
        return result

    async def score(self: Any) -> dict[str, float]:
        play, models = stage.play, self._models
        asked = models.calls() if models is not None else {}
        first = await FirstWait(cls.score(self), lambda: play.first_wait(_where_of_score(play), SCORE))
        play.went_on(_where_of_score(play))
        if play.score_twice and not play.bad_rewards:
            play.score_twice = False
            if models is not None:
                models.rewind(asked)  # What a judge may be asked is for one score.
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
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Any = type(owner)(cls.__name__, (cls,), body)
    observed: type[Env[Any]] = made
    return observed


def _where_of_score(play: ObservedRollout) -> str:
    """Name the code that scores."""
    return f"reward {play.rewards_running[-1]!r}" if play.rewards_running else "score()"


def _where(play: ObservedRollout) -> str:
    """Name the code that runs in this turn."""
    if play.rewards_running:
        return _where_of_score(play)
    named = [call["function"]["name"] for call in play.turns[-1].action.get("tool_calls", ())]
    return f"tool {', '.join(map(repr, named))}" if named else "step()"


def _observed_reward(cls: type[Env[Any]], name: str, stage: Stage) -> Iterator[Any]:
    """Yield the reward method, made to report what it returns; nothing where it is no function."""
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
    """Note a reward that is no finite number."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        play.bad_rewards.setdefault(name, f"returned {value!r:.80}")


def _differing(first: dict[str, float], second: dict[str, float]) -> list[str]:
    names = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    return [f"{name!r} was {a!r} and then {b!r}" for name, (a, b) in names.items() if a != b]

"""Rollouts of an env, one after the other, and the engines that play them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.engines.base import Engine
from agentgym.engines.scripted import Reply, Scripted, Seeing
from agentgym.environments.env import Env
from agentgym.errors import EngineError
from agentgym.rollouts.rollout import rollout
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing.env_checks.observed import ObservedRollout, observed_class
from agentgym.testing.env_checks.spoiled import Hostile
from agentgym.types.completion import Completion
from agentgym.types.messages import Message, first_image, kept_message
from agentgym.types.rollout import Rollout

CANCEL_GRACE_S = 30.0
"""Maximum seconds that a cancelled rollout may take to close."""
_NAMED = "check_env-"
"""Prefix of the last part of the ids of a check's own rollouts."""


def is_of_check(rollout_id: str) -> bool:
    """Return whether this is the id of a rollout that an env's check ran."""
    return rollout_id.rpartition("/")[2].startswith(_NAMED)


class Repeating(Scripted):
    """An engine that repeats the last reply of its script for as long as the env continues."""

    def _next(self, token_ids: Sequence[int], session: str) -> Reply:
        played = self._played.get(session.rpartition("/")[0], 0)
        if not callable(self.replies) and played >= len(self.replies):
            return self.replies[-1]
        return super()._next(token_ids, session)


class Once(Scripted):
    """An engine with one reply; at a second request, it records that the rollout continued, and ends it."""

    went_on = False

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        if self._played:
            self.went_on = True
            raise EngineError("the check needs only the first turn of this rollout")
        return await super().generate(*args, **kwargs)


class Waiting(Scripted):
    """An engine that never responds."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked = asyncio.Event()

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


class Stage:
    """Runs rollouts of one env class one after the other, and observes each."""

    def __init__(
        self,
        cls: type[Env[Any]],
        task: Any,
        sandboxes: SandboxPool | None,
        models: Mapping[str, Engine] | None = None,
        *,
        sees: bool = False,
    ) -> None:
        self.task, self.sandboxes, self.models, self.sees = task, sandboxes, models, sees
        self.shows_images = False
        """Whether the env has shown an image to a model."""
        self.play = ObservedRollout()
        self.cls = observed_class(cls, self)
        self.offers_tools = False
        """Whether the last rollout's env showed tools to the model."""

    async def run(
        self,
        name: str,
        engine: Scripted,
        *,
        cancel_in: int | None = None,
        score_twice: bool = False,
        hostile: Hostile | None = None,
    ) -> ObservedRollout:
        """Run one rollout to its end, with `name` in its id; anything that it raises is in the result's `error`."""
        play = self.play = ObservedRollout(cancel_in=cancel_in, score_twice=score_twice, hostile=hostile)
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
        """Run a rollout and cancel it while it waits for the engine."""
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
        playing = rollout(
            self.cls, self.task, asked, sandboxes=self.sandboxes, seed=7, rollout_id=named, models=self.models
        )
        return asyncio.create_task(playing)

    def read(self, messages: Any) -> list[Message]:
        """Return the messages with contents in stored form: text, or a list of parts if there is an image.

        If a message is invalid, all messages are returned unchanged. An image is recorded in `shows_images`.
        """
        try:
            kept = [kept_message(message, "") for message in messages]
        except (ValueError, AttributeError):  # The rollout rejects them.
            return list(messages)
        self.shows_images |= first_image(kept) is not None
        return kept


async def _stop(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

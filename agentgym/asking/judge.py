"""Judges: a rubric that a named model applies, with answers in a pydantic model."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from agentgym.asking.answer_cache import AnswerCache, question_key
from agentgym.asking.named import kept
from agentgym.asking.structured import read_answer
from agentgym.environments.forks import AnswerT, Model
from agentgym.errors import ModelLimitError
from agentgym.field_checks import Above0, Count, Folder, NotNegative, Positive, Text, check_fields, names_its_fields
from agentgym.folders.names import whole_path
from agentgym.messages import Message
from agentgym.time_limits import off_the_clock

log = logging.getLogger(__name__)


@names_its_fields
@dataclass(frozen=True, kw_only=True, eq=False)
class Judge(Generic[AnswerT]):
    """Asks a named model to apply a rubric: `await judge.ask(self.model("judge"), text)` in an env.

    One object serves all rollouts of a process. An answer that it has on disk is not asked for again: it depends on the
    model and its version, the rubric, the messages, the response's schema, the settings of sampling, and `version`. The
    answers of an engine that does not say its model's name, such as a `Scripted` without `model_name`, are not kept,
    which the log says once.
    """

    rubric: Text
    """What the model is told first: what to look at, and what each score means."""
    response: type[AnswerT]
    """A pydantic model; its fields and their descriptions are what the model has to fill in."""
    cache: Folder | None = None
    """The file of the answers, which processes may share; None keeps none."""
    version: str = ""
    """Part of what an answer in the cache depends on: change it where the model has changed under the same name."""
    concurrency: Positive = 16
    """Most questions in flight at once, over all rollouts of this process."""
    calls: Positive | None = None
    """Most times that one rollout asks this model, repeated questions included; None for no such limit."""
    retries: Count = 2
    """Most new attempts where the engine fails or the answer does not fit the response."""
    max_tokens: Positive = 1024
    """Most tokens of an answer."""
    temperature: NotNegative = 0.0
    """The temperature; 0 takes the likeliest token."""
    timeout_s: Above0 = 120.0
    """Most seconds for an answer, from when it is asked for; waiting for others' questions is not among them."""

    def __post_init__(self) -> None:
        if not (isinstance(self.response, type) and issubclass(self.response, BaseModel)):
            raise ValueError(
                f"response: must be a pydantic model, such as `class Verdict(BaseModel)`, got {self.response!r}"
            )
        check_fields(self, Judge)
        if self.cache is not None:
            object.__setattr__(self, "cache", whole_path(self.cache))

    async def ask(self, model: Model, messages: str | Sequence[Message]) -> AnswerT:
        """Return the model's answer to the rubric and these messages, or to one text, from the cache where it is there.

        The rollout's time limits stand still meanwhile, and its metrics count the calls, tokens and seconds of the
        model, and the answers that were cached.

        :raises EngineError: where the model has not answered after all.
        :raises ModelLimitError: if the question is too long, or the rollout has had its calls; a reward is then 0.0.
        """
        said = [Message(role="user", content=messages)] if isinstance(messages, str) else kept(messages)
        asked = [Message(role="system", content=self.rubric), *said]
        with off_the_clock():
            if self.cache is None or not self._can_keep(self.cache, model):
                return (await self._ask(model, asked))[1]
            cache, key = AnswerCache(self.cache), self._key(model, asked)
            found = await asyncio.to_thread(self._kept, cache, key)
            if found is not None:
                model.count("cached")
                return found
            written, answer = await self._ask(model, asked)
            await asyncio.to_thread(cache.put, key, written)
            return answer

    def _can_keep(self, path: Path, model: Model) -> bool:
        """Whether the model's answers can be told from those of another model; the log says once where not."""
        if not model.identity:
            _say_nameless(path, model.name)
        return bool(model.identity)

    def _kept(self, cache: AnswerCache, key: str) -> AnswerT | None:
        """Return the answer in the cache; one that cannot be read is dropped there, which the log says once."""
        written = cache.get(key)
        if written is None:
            return None
        try:
            return read_answer(written, self.response)[1]
        except ValueError:
            _say_unreadable(cache.path, self.response.__name__)
            cache.drop(key, written)
            return None

    async def _ask(self, model: Model, messages: Sequence[Message]) -> tuple[str, AnswerT]:
        retries = self.retries
        async with self._place():
            if self.calls is not None:
                if model.calls >= self.calls:
                    raise ModelLimitError(
                        f"judge {model.name!r}: the rollout has asked it {model.calls} times, and Judge.calls allows "
                        f"{self.calls}; ask for less, or raise it"
                    )
                retries = min(retries, self.calls - model.calls - 1)
            return await model.ask_json(
                messages,
                self.response,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                retries=retries,
                timeout_s=self.timeout_s,
            )

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold one of the places for questions in flight; a semaphore belongs to one event loop."""
        of_loops = _places.setdefault(self, WeakKeyDictionary())
        places = of_loops.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        async with places:
            yield

    def _key(self, model: Model, messages: Sequence[Message]) -> str:
        return question_key(
            model=model.identity,
            messages=[dict(message) for message in messages],
            schema=self.response.model_json_schema(),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            version=self.version,
        )


@functools.cache
def _say_nameless(path: Path, model: str) -> None:
    log.warning(
        "cache: no answers of the model %r are kept in %s: its engine has no model_name, which would tell them from "
        "those of another model; give it one, as in Scripted(replies, model_name='rules-1')",
        model,
        path,
    )


@functools.cache
def _say_unreadable(path: Path, response: str) -> None:
    log.warning("cache: %s holds answers that fit no %s; they are asked for again", path, response)


_places: "WeakKeyDictionary[Judge[Any], WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]]"
_places = WeakKeyDictionary()
"""The places of each judge for questions in flight, in each event loop."""

"""Judges: a rubric that a model role applies, with answers in a pydantic model."""

import asyncio
import hashlib
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import cache
from pathlib import Path
from typing import Any, Generic
from weakref import WeakKeyDictionary

from agentgym.config_fields import Above0, Count, Folder, NotNegative, Positive, Text, config
from agentgym.environments.forks import AnswerT, Model
from agentgym.errors import ModelLimitError
from agentgym.files.disk import disk_trouble
from agentgym.files.names import whole_path
from agentgym.judges.model_roles import kept
from agentgym.judges.structured import read_answer
from agentgym.machine.time_limits import off_the_clock
from agentgym.types.messages import Message

log = logging.getLogger(__name__)


TABLE = "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID"
WAIT_S = 30.0
"""How long a reader or a writer waits for another process that holds the file."""
_places: "WeakKeyDictionary[Judge[Any], WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]]"
_places = WeakKeyDictionary()
"""The places of each judge for questions in flight, in each event loop."""


class AnswerCache:
    """Keeps one answer for each question in a file; its methods block, and are called in threads.

    :raises ValueError: from each, naming the file, where it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, question: str) -> str | None:
        """Return the answer; None where there is none."""
        rows = self._do("SELECT answer FROM answers WHERE question = ?", question)
        return rows[0][0] if rows else None

    def put(self, question: str, answer: str) -> None:
        """Keep the answer; an earlier one to the same question stays.

        If the disk does not take it, the log says so once: the answer is there, and was paid for.
        """
        try:
            self._do("INSERT OR IGNORE INTO answers VALUES (?, ?)", question, answer)
        except ValueError as error:
            if (why := disk_trouble(error)) is None:
                raise
            _say_not_kept(self.path, why)

    def drop(self, question: str, answer: str) -> None:
        """Forget this answer; another one to the same question stays."""
        self._do("DELETE FROM answers WHERE question = ? AND answer = ?", question, answer)

    def _do(self, sql: str, *values: str) -> list[Any]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)) as connection:
                connection.execute(TABLE)
                return connection.execute(sql, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"cache: {self.path} cannot be used ({error}); give another file, or remove it") from error


@cache
def _say_not_kept(path: Path, why: str) -> None:
    log.warning("cache: answers cannot be written to %s (%s): they are used and not kept", path, why)


def question_key(**parts: Any) -> str:
    """Return what stands for a question in the cache: a digest of all that its answer depends on."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=20).hexdigest()


@config(frozen=True, kw_only=True, eq=False)
class Judge(Generic[AnswerT]):
    """Asks a model role to apply a rubric: `await judge.ask(self.model("judge"), text)` in an env.

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


@cache
def _say_nameless(path: Path, model: str) -> None:
    log.warning(
        "cache: no answers of the model %r are kept in %s: its engine has no model_name, which would tell them from "
        "those of another model; give it one, as in Scripted(replies, model_name='rules-1')",
        model,
        path,
    )


@cache
def _say_unreadable(path: Path, response: str) -> None:
    log.warning("cache: %s holds answers that fit no %s; they are asked for again", path, response)

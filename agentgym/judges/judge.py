"""Judges: model roles that apply a rubric and return a pydantic model."""

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
from agentgym.errors import EngineError, ModelLimitError
from agentgym.files.disk import disk_trouble
from agentgym.files.names import whole_path
from agentgym.judges.model_roles import NoAnswerInTime, kept
from agentgym.judges.structured import read_answer
from agentgym.machine.time_limits import off_the_clock
from agentgym.types.messages import Message

log = logging.getLogger(__name__)


TABLE = "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID"
WAIT_S = 30.0
"""Seconds that a reader or a writer waits for another process that has locked the file."""
_places: "WeakKeyDictionary[Judge[Any], WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]]"
_places = WeakKeyDictionary()
"""A semaphore for each judge and event loop, which limits the queries in flight."""


class AnswerCache:
    """Stores one response per question in a SQLite file. Its methods block, so call them in threads.

    Raises:
        ValueError: From each method, if the file can't be read or written. The message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, question: str) -> str | None:
        """Return the cached response, or None if there is none."""
        rows = self._do("SELECT answer FROM answers WHERE question = ?", question)
        return rows[0][0] if rows else None

    def put(self, question: str, answer: str) -> None:
        """Store a response, unless the question already has one.

        If the disk is full or fails, this logs a warning once instead of failing, since the response exists and was
        paid for.
        """
        try:
            self._do("INSERT OR IGNORE INTO answers VALUES (?, ?)", question, answer)
        except ValueError as error:
            if (why := disk_trouble(error)) is None:
                raise
            _say_not_kept(self.path, why)

    def drop(self, question: str, answer: str) -> None:
        """Delete this response. If the question has a different response, that one stays."""
        self._do("DELETE FROM answers WHERE question = ? AND answer = ?", question, answer)

    def _do(self, sql: str, *values: str) -> list[Any]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)) as connection:
                connection.execute(TABLE)
                return connection.execute(sql, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"cache: {self.path} cannot be used ({error}); use another file, or remove this one"
            ) from error


@cache
def _say_not_kept(path: Path, why: str) -> None:
    log.warning("cache: responses cannot be written to %s (%s): they are used, but not cached", path, why)


def question_key(**parts: Any) -> str:
    """Return the cache key of a question: a digest of everything that its response depends on."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=20).hexdigest()


@config(frozen=True, kw_only=True, eq=False)
class Judge(Generic[AnswerT]):
    """Has a model role apply a rubric: `await judge.ask(self.model("judge"), text)` in an env.

    One object serves all rollouts of a process. With a `cache`, responses are stored on disk and reused if the model
    and its version, the rubric, the messages, the response's schema, the sampling settings and `version` are all the
    same. The responses of an engine that doesn't report its model's name, such as a `Scripted` without `model_name`,
    aren't cached, and a warning is logged once.
    """

    rubric: Text
    """The system prompt: what to judge, and what each score means."""
    response: type[AnswerT]
    """A pydantic model whose fields, with their descriptions, the judge has to fill in."""
    cache: Folder | None = None
    """The cache file, which several processes may share; None for no cache."""
    version: str = ""
    """Part of the cache key. Change it if the model has changed under the same name."""
    concurrency: Positive = 16
    """Maximum number of queries in flight, over all rollouts of this process."""
    calls: Positive | None = None
    """Maximum number of queries to this model per rollout, including retries; None for no limit."""
    retries: Count = 2
    """Maximum number of retries if the engine fails or the response doesn't fit the schema."""
    max_tokens: Positive = 1024
    """Maximum number of tokens in a response."""
    temperature: NotNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    timeout_s: Above0 = 120.0
    """Maximum number of seconds per question, including its retries, but not the wait for other questions."""

    def __post_init__(self) -> None:
        if self.cache is not None:
            object.__setattr__(self, "cache", whole_path(self.cache))

    async def ask(self, model: Model, messages: str | Sequence[Message]) -> AnswerT:
        """Return the model's verdict on these messages according to the rubric, from the cache if possible.

        The rollout's time limits are suspended meanwhile. Its metrics count the model's calls, tokens and seconds,
        and the cached responses.

        Args:
            model: The model role to query, from `self.model(name)` in an env.
            messages: The messages to judge, or a text that is sent as one user message.

        Raises:
            EngineError: If the model fails, or returns no valid response after all retries.
            ModelLimitError: If the question is too long, or the rollout has used up its `calls`. If a reward function
                doesn't catch it, the reward is 0.0.
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
        """Return whether the model can be identified in the cache. If not, log a warning once."""
        if not model.identity:
            _say_nameless(path, model.name)
        return bool(model.identity)

    def _kept(self, cache: AnswerCache, key: str) -> AnswerT | None:
        """Return the cached response. If it can't be parsed, delete it and log a warning once."""
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
                        f"judge {model.name!r}: the rollout has queried it {model.calls} times, but Judge.calls allows "
                        f"{self.calls}; query it less often, or raise Judge.calls"
                    )
                retries = min(retries, self.calls - model.calls - 1)
            try:
                return await model.ask_json(
                    messages,
                    self.response,
                    max_tokens=self.max_tokens,
                    temperature=self.temperature,
                    retries=retries,
                    timeout_s=self.timeout_s,
                )
            except EngineError as error:
                if retries == self.retries or isinstance(error, NoAnswerInTime):
                    raise
                raise EngineError(
                    f"{error}; Judge.calls of {self.calls} left {retries} of {self.retries} retries, because a retry "
                    "counts as a call: raise Judge.calls"
                ) from error

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold one of `concurrency` places for a query during the `async with`, after waiting for a free one.

        Each event loop has its own places.
        """
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
        "cache: responses of the model %r are not cached in %s, because its engine has no model_name to tell them "
        "from another model's; set one, as in Scripted(replies, model_name='rules-1')",
        model,
        path,
    )


@cache
def _say_unreadable(path: Path, response: str) -> None:
    log.warning("cache: %s contains responses that do not fit %s; they are requested again", path, response)

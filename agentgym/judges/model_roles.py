"""A rollout's model roles, the models other than its policy: their queries, and counts of calls, tokens and time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from agentgym.chat.message_chat import MessageChat
from agentgym.chat.reasoning import THINK, split_reasoning
from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.chat.tools_in_prompt import calls_as_text
from agentgym.config_fields import nearest
from agentgym.engines.base import Engine, check_engine, own_model_name
from agentgym.engines.messages import MessageCompletion, MessageEngine, Usage, open_chat
from agentgym.environments.env import Env
from agentgym.environments.forks import Model
from agentgym.errors import EngineError, EnvError, ModelLimitError, boundary
from agentgym.hub import of_field
from agentgym.judges.structured import asking_for, read_answer, told
from agentgym.machine.time_limits import TimeLimit, off_the_clock
from agentgym.seeds import seed_for
from agentgym.types.completion import Completion, Sampling
from agentgym.types.messages import Message, kept_message
from agentgym.types.rollout import Rollout

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.5
"""Seconds before the first retry of a failed engine. Each later wait is twice as long."""
DoneT = TypeVar("DoneT", Completion, MessageCompletion)


class NoAnswerInTime(EngineError):
    """A model role did not respond within `timeout_s`."""


def check_models(models: Mapping[str, Engine] | None) -> dict[str, Engine]:
    """Return the models as a dict.

    Raises:
        TypeError: If `models` isn't a mapping, or a value isn't an engine. The message names the entry.
        ValueError: If a name is invalid.
    """
    if models is None:
        return {}
    if not isinstance(models, Mapping):
        raise TypeError(f'models: must be engines by name, such as {{"judge": engine}}, got {models!r:.80}')
    for name, engine in models.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"models: {name!r} is not a valid name; use a word without a slash, such as 'judge'")
        with of_field(engine=f"models[{name!r}]"):
            check_engine(engine)
    return dict(models)


def unasked(names: Iterable[str], played: Sequence[Rollout], envs: Iterable[type[Env[Any]]]) -> list[str]:
    """Return a sentence for each model role that no rollout has queried, because its name may be misspelled.

    Args:
        names: The model roles that a run or an evaluation sets.
        played: The rollouts.
        envs: The envs; a sentence may suggest a model role that has a fallback model in one of them.
    """
    asked = {name.partition("/")[2] for rollout in played for name in rollout.metrics if name.startswith("model_")}
    asked |= {segment.model for rollout in played for segment in rollout.segments}
    known = {name for env in envs for name in env.fallback_models}
    return [
        f"no rollout has queried the model {name!r}; "
        + (nearest(name, known) if known else "the env may use another name for it")
        for name in sorted(set(names) - asked)
    ]


class ModelRoles:
    """The model roles of one rollout: `models("judge")` returns the model of that role, which is created once.

    A role for which the run names no model uses the one in `fallback_models`.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        fallback_models: Mapping[str, Engine],
        *,
        owner: str,
        session: str,
        seed: int,
        metrics: dict[str, float],
    ) -> None:
        self.engines, self.fallback_models = engines, fallback_models
        self.owner, self.session, self.seed, self.metrics = owner, session, seed, metrics
        self._models: dict[str, AskedModel] = {}

    def engine(self, name: str) -> Engine:
        """Return the engine of a role.

        Raises:
            EnvError: If the role has no engine. The message lists the roles and explains how to set one.
        """
        if name in self.engines:
            return self.engines[name]
        if name in self.fallback_models:
            _warn_of_fallback(self.owner, name)
            return check_models(self.fallback_models)[name]
        raise EnvError(
            f"{self.owner}: there is no model {name!r}; there are: {', '.join(self.engines) or 'none'}. {_how(name)}"
        )

    def __call__(self, name: str) -> "AskedModel":
        """Return the model of a role.

        Raises:
            EnvError: If the role has no engine.
        """
        engine = self.engine(name)
        if name not in self._models:
            self._models[name] = AskedModel(name, engine, f"{self.session}/model.{name}", self.seed, self.metrics)
        return self._models[name]

    def asked(self) -> dict[str, "AskedModel"]:
        """Return the models that were created so far, by role."""
        return dict(self._models)

    def calls(self) -> dict[str, int]:
        """Return the number of calls of each model so far."""
        return {name: model.calls for name, model in self._models.items()}

    def rewind(self, calls: Mapping[str, int]) -> None:
        """Reset the counters to the result of an earlier `calls`, so that later calls get the same seeds again."""
        for name, model in self._models.items():
            model.calls = calls.get(name, 0)

    def sessions(self) -> list[tuple[Engine, str]]:
        """Return every session that the models opened, with its engine."""
        return [(model.engine, session) for model in self._models.values() for session in model.sessions]

    async def release(self) -> None:
        """Release every session that the models opened, even if releasing one of them fails."""
        await release_each(self.sessions())


async def release_each(sessions: Iterable[tuple[Engine, str]]) -> None:
    """Release every session of these engines, even if releasing one of them fails.

    Raises:
        EngineError: The last error, if a release failed.
        CancelledError: If a release was cancelled. It takes precedence.
    """
    failed: BaseException | None = None
    for engine, session in sessions:
        try:
            with boundary(EngineError, "release"):
                await engine.release(session)
        except (EngineError, asyncio.CancelledError) as error:
            failed = failed if isinstance(failed, asyncio.CancelledError) else error
    if failed is not None:
        raise failed


def kept(messages: Sequence[Message]) -> list[Message]:
    """Return the messages in the form in which they are stored.

    Raises:
        ValueError: If a part of a message is invalid. The message names it.
    """
    return [kept_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _answer_of(message: Message) -> str:
    """Return the text of a message without its reasoning, which not every engine separates."""
    content = str(message["content"])
    return content if message.get("reasoning_content") else split_reasoning(content)[1]


def _quoting(message: Message, written: str, tokenizer: ChatTokenizer) -> str:
    """Return a text that quotes a tool call, without its reasoning. A model role has no tools, so it makes no calls.

    Args:
        message: The message that the text was parsed into.
        written: The text.
        tokenizer: The tokenizer that parsed it.
    """
    marks = getattr(getattr(tokenizer, "response_format", None), "reasoning", (THINK,))
    return split_reasoning(written, marks=marks)[1] if marks else calls_as_text(message)["content"]


def _how(name: str) -> str:
    """Return the instructions for setting a model role."""
    return (
        f'Pass it as models={{"{name}": engine}} to ag.rollout, run_groups, evaluate, Scheduler or check_env, or in a '
        f'recipe as models={{"{name}": ag.ModelRoleConfig(model=...)}}; recipes, `agentgym train` and `agentgym eval` '
        f"take --models.{name}.model MODEL, and `agentgym eval` also --models.{name}.url URL"
    )


@cache
def _warn_of_fallback(owner: str, name: str) -> None:
    """Log a warning, once per process, that the run gives no model for the role `name` of the env `owner`.

    The env's fallback model is used instead.
    """
    log.warning("%s: no model %r was given, so the env's own fallback model is used. %s", owner, name, _how(name))


class AskedModel(Model):
    """A model role of a rollout. Each call in flight has a separate session of the engine."""

    def __init__(self, name: str, engine: Engine, session: str, seed: int, metrics: dict[str, float]) -> None:
        self.name, self.engine, self.calls = name, engine, 0
        self._session, self._seed, self._metrics = session, seed, metrics
        self._busy: list[bool] = []
        """For each session, whether a call is in flight."""

    @property
    def sessions(self) -> list[str]:
        """The sessions that were opened: as many as there were calls in flight at the same time."""
        return [f"{self._session}.{place}" for place in range(len(self._busy))]

    @property
    def identity(self) -> str:
        """The name and version of the engine's model; "" if the engine doesn't report its name."""
        name = own_model_name(self.engine)
        return f"{name} {self.engine.version}" if name else ""

    def count(self, what: str, number: float = 1.0) -> None:
        """Add `number` to the rollout's metric `model_WHAT/NAME`, where NAME is the name of this model role."""
        metric = f"model_{what}/{self.name}"
        self._metrics[metric] = self._metrics.get(metric, 0.0) + number

    async def _ask(
        self,
        messages: str | Sequence[Message],
        response: type[BaseModel] | None,
        max_tokens: int,
        temperature: float,
        retries: int,
        timeout_s: float,
    ) -> tuple[str, Any]:
        said = [Message(role="user", content=messages)] if isinstance(messages, str) else kept(messages)
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
        limit, loop = TimeLimit(timeout_s), asyncio.get_running_loop()
        start = loop.time()
        with off_the_clock():
            try:
                return await limit.bound(self._answered(said, response, sampling, retries))
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise NoAnswerInTime(f"model {self.name!r}: no response within {timeout_s:g} s (timeout_s)") from error
            finally:
                self.count("seconds", loop.time() - start)

    async def _answered(
        self, messages: list[Message], response: type[BaseModel] | None, sampling: Sampling, retries: int
    ) -> tuple[str, Any]:
        """Query the engine until a response is valid, and return its text and its parsed value."""
        asked = messages if response is None else asking_for(response, messages)
        wait_s, wrong = FIRST_WAIT_S, ""
        for attempt in range(retries + 1):
            self.count("retries", float(attempt > 0))
            try:
                text, cut = await self._generated(asked, sampling)
            except EngineError:
                if attempt == retries:
                    raise
                await asyncio.sleep(wait_s)
                wait_s *= 2
                continue
            if response is None:
                return text, text
            try:
                return read_answer(text, response, cut=cut)
            except ValueError as error:
                wrong = str(error)
                asked = told(asked, text, f"That does not fit the schema: {wrong}. Write the JSON object again.")
        raise EngineError(
            f"model {self.name!r}: no valid {response.__name__ if response else 'text'} in {retries + 1} responses; "
            f"the last one: {wrong}"
        )

    async def _generated(self, messages: Sequence[Message], sampling: Sampling) -> tuple[str, bool]:
        """Query the engine once. Return its text without reasoning, and whether a limit cut it off."""
        with boundary(EnvError, f"the messages to model {self.name!r}"):
            chat = open_chat(self.engine, [], messages)
            ids = chat.prompt_ids()
        room = self.engine.context_tokens - len(ids)
        if room <= 0:
            raise ModelLimitError(
                f"model {self.name!r}: {len(messages)} messages with {len(ids)} ids leave no room for a reply in its "
                f"context of {self.engine.context_tokens}; use a model with a larger context, or send less (a "
                "conversation with a simulated user ends sooner with lower limits.turns)"
            )
        budget = min(room, sampling.max_tokens or room)
        if isinstance(chat, MessageChat):
            return await self._replied(messages, sampling, budget)
        done = await self._completed(
            lambda session, seed: self.engine.generate(
                ids, session=session, max_tokens=budget, sampling=sampling, seed=seed
            )
        )
        self.count("tokens", len(done.token_ids))
        self.count("prompt_tokens", len(ids))
        sampled, stopped = done.token_ids.tolist(), done.finish_reason == "stop"
        message = chat.parse(sampled, stopped=stopped)
        if "tool_calls" in message:
            written = chat.tokenizer.decode(sampled[:-1] if stopped else sampled)
            return _quoting(message, written, chat.tokenizer), done.finish_reason == "length"
        return _answer_of(message), done.finish_reason == "length"

    async def _replied(self, messages: Sequence[Message], sampling: Sampling, budget: int) -> tuple[str, bool]:
        """Query an engine that works on messages; see `_generated`."""
        engine = self.engine
        assert isinstance(engine, MessageEngine)

        async def asked(session: str, seed: int) -> MessageCompletion:
            try:
                return await engine.generate_message(
                    messages, [], session=session, max_tokens=budget, sampling=sampling, seed=seed
                )
            except EngineError as error:
                self._count_usage(Usage(sent_again=error.sent_again))
                raise

        done = await self._completed(asked)
        self._count_usage(done.usage)
        return _answer_of(done.message), done.finish_reason == "length"

    def _count_usage(self, usage: Usage) -> None:
        for metric, value in usage.metrics(self.name).items():
            self._metrics[metric] = self._metrics.get(metric, 0.0) + value

    async def _completed(self, asked: Callable[[str, int], Awaitable[DoneT]]) -> DoneT:
        """Generate a completion in a session that has no other call in flight, with a new seed, and return it.

        Args:
            asked: A function that queries the engine; its arguments are the name of the session and the seed.

        Raises:
            EngineError: If the engine fails or aborts the reply.
        """
        seed = seed_for("question", self._seed, self._session, self.calls)
        self.calls += 1
        self.count("calls")
        if all(self._busy):
            self._busy.append(False)
        place = self._busy.index(False)
        self._busy[place] = True
        try:
            with boundary(EngineError, f"model {self.name!r}"):
                done = await asked(self.sessions[place], seed)
        finally:
            self._busy[place] = False
        self.count("cut_answers", float(done.finish_reason == "length"))
        if done.finish_reason == "abort":
            raise EngineError(f"model {self.name!r}: the engine aborted the reply")
        return done

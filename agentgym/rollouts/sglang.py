"""The SGLang engine: the model behind one or several SGLang servers, spoken to over HTTP in ids.

A weight swap overtakes no turn: each request in flight is ended by its id, what it had is kept, and the turn goes on
from there under the weights that are current::

    ids       a a a a | b b b e        the swap came after four ids
    versions  (0, 6)  | (4, 7)
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import numpy as np

from agentgym.errors import EngineError
from agentgym.rollouts.chat import ChatTokenizer
from agentgym.rollouts.sglang_config import SGLangConfig
from agentgym.rollouts.sglang_fleet import open_servers
from agentgym.rollouts.sglang_model import ModelFacts, model_facts, write_adapter
from agentgym.rollouts.sglang_process import Progress
from agentgym.rollouts.sglang_router import Router
from agentgym.rollouts.sglang_server import Ask, Limits, Policy, Server, Unavailable
from agentgym.types import Adapter, Completion, Floats, Sampling, Version

__all__ = ["SGLangConfig", "SGLangEngine"]

_AGAIN_S = 0.2
"""An abort that came before its request is without effect: it is sent again until the request has ended."""


@dataclass(slots=True, eq=False)
class _Piece:
    """One request in flight: a turn, or what is left of it."""

    rid: str
    server: Server
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False, kw_only=True)
class _Turn:
    """One call of `generate`, whatever requests it takes."""

    prompt: list[int]
    session: str
    max_tokens: int
    sampling: Sampling
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    piece: _Piece | None = None
    ending: Literal["keep", "drop"] | None = None
    """What `abort` asked for."""

    def take(self, piece: Completion) -> None:
        """Append what a request sampled; a version that goes on is not named twice."""
        for start, version in piece.versions if len(piece.token_ids) else ():
            if not self.versions or self.versions[-1].version != version:
                self.versions.append(Version(start + len(self.ids), version))
        self.ids += piece.token_ids.tolist()
        self.logprobs += piece.logprobs.tolist()

    def completion(self, finish_reason: Literal["stop", "length", "abort"], version: int) -> Completion:
        """All of it; nothing where it is to be dropped."""
        kept = 0 if self.ending == "drop" else len(self.ids)
        return Completion(
            token_ids=np.array(self.ids[:kept], np.int64),
            logprobs=np.array(self.logprobs[:kept], np.float32),
            finish_reason="abort" if self.ending == "drop" else finish_reason,
            versions=tuple(self.versions if kept else ()) or (Version(0, version),),
        )


@dataclass(slots=True)
class Counts:
    """What became of the requests and servers since the engine opened."""

    turns: int = 0
    requests: int = 0
    retried: int = 0
    """Requests sent again, to the same server or another."""
    swapped: int = 0
    """Requests ended because the weights changed, and continued."""
    lost_servers: int = 0
    revived_servers: int = 0


class SGLangEngine:
    """Samples through SGLang servers; implements `Engine`, open inside `async with`.

    `model` is a folder or hub name: its files say which ids there are and which of them end a turn; an attached
    server's own path stands in for None. Servers are those of `config.urls`, or else launched, and then ended with
    all their processes however this process ends. A server that dies or hangs is lost: its requests are sent to
    another one, which nothing but the engine has noticed; without another one they fail with EngineError.
    """

    def __init__(
        self,
        model: str | Path | None,
        config: SGLangConfig | None = None,
        *,
        tokenizer: ChatTokenizer | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._config = config or SGLangConfig()
        if model is None and not self._config.urls:
            raise ValueError("model: a server to launch needs one")
        self._model, self._tokenizer, self._progress = model, tokenizer, progress
        self._router = Router([])
        self._facts: ModelFacts | None = None
        self._limits: list[Limits] = []
        self._policy = Policy(None, 0)
        self._turns: dict[str, _Turn] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._updating = asyncio.Lock()
        self._probed = 0
        self._paused = False
        self._counts = Counts()
        self._stack: AsyncExitStack | None = None
        self._folder = Path()

    @classmethod
    def launch(
        cls,
        model: str | Path,
        config: SGLangConfig | None = None,
        *,
        tokenizer: ChatTokenizer | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """An engine that launches its servers when it opens, telling `progress` what they do, and owns them."""
        config = config or SGLangConfig()
        if config.urls:
            raise ValueError(f"urls: {list(config.urls)} run already; attach to them")
        return cls(model, config, tokenizer=tokenizer, progress=progress)

    @classmethod
    def attach(
        cls,
        *urls: str,
        model: str | Path | None = None,
        config: SGLangConfig | None = None,
        tokenizer: ChatTokenizer | None = None,
    ) -> Self:
        """An engine over servers that run already, and go on running when it closes."""
        if not urls:
            raise ValueError("urls: at least one")
        return cls(model, replace(config or SGLangConfig(), urls=urls), tokenizer=tokenizer)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._folder = Path(stack.enter_context(TemporaryDirectory(prefix="agentgym-sglang-")))
            servers = await open_servers(stack, self._config, self._model, self._folder, self._progress)
            self._limits = [await server.limits() for server in servers]
            model = self._model or self._limits[0].model
            self._facts = await asyncio.to_thread(model_facts, model, self._tokenizer)
            self._router = Router(servers)
            self._policy, self._paused, self._counts = Policy(None, 0), False, Counts()
            stack.push_async_callback(self._settle)
            self._stack = stack.pop_all()
        self._spawn(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def tokenizer(self) -> ChatTokenizer:
        """How this engine's model reads and writes chats."""
        if self._tokenizer is not None:
            return self._tokenizer
        return self._opened().tokenizer

    @property
    def context_tokens(self) -> int:
        """The most ids, prompt and completion together, that one request may hold on every server."""
        return min(self._config.context_tokens, *(limits.context_tokens for limits in self._limits), 1 << 30)

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled under; 0 before the first `load_adapter`."""
        return self._policy.version

    @property
    def seeded(self) -> bool:
        """Whether a turn's seed decides its draws: servers do that under `--enable-deterministic-inference`."""
        return bool(self._limits) and all(limits.seeded for limits in self._limits)

    @property
    def counts(self) -> Counts:
        """A copy of the counters since the engine opened."""
        return replace(self._counts)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """At most `max_tokens` ids after `token_ids`, each with the log-probability it was drawn with.

        The stop id, where one ended the turn, is the last. Where `seeded`, draws depend on the arguments and the
        weights alone. Raises ValueError for ids outside the vocabulary, a request over the context or a session that is
        still generating; EngineError where no server can answer, or one answers what it should not. Cancelling the
        call ends its request on the server.
        """
        ids = self._checked(token_ids)
        if max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {max_tokens}")
        if len(ids) + max_tokens > self.context_tokens:
            raise ValueError(
                f"max_tokens: {len(ids)} ids and {max_tokens} new ones do not fit {self.context_tokens} context_tokens"
            )
        if session in self._turns:
            raise ValueError(f"session: {session!r} is still generating")
        turn = _Turn(prompt=ids, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed)
        self._turns[session] = turn
        self._counts.turns += 1
        try:
            return await self._sample(turn)
        finally:
            del self._turns[session]

    async def abort(self, session: str, *, keep: bool) -> None:
        """End the turn that a session is sampling, if any: its `generate` answers with finish_reason "abort".

        The answer holds what was sampled, or nothing without `keep`. A turn that ended by itself just before is
        answered as it ended, where it is to be kept.
        """
        turn = self._turns.get(session)
        if turn is None:
            return
        turn.ending = "keep" if keep else "drop"
        if turn.piece is not None:
            await self._end(turn.piece)

    async def pause(self) -> None:
        """No server samples until `resume`; turns keep their place and their KV."""
        self._paused = True
        await self._each(self._living(), lambda server: server.pause())

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        await self._each(self._living(), lambda server: server.resume())

    async def release(self, session: str) -> None:
        """Forget a session; unknown ones are forgotten already."""
        self._router.release(session)

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        """Sample new tokens from base plus adapter (None: the base alone), under `version` from now on.

        Turns in flight go on under the new weights from where they are, and their `versions` tell where. Raises
        ValueError, and changes nothing, for an adapter that does not fit the model or the servers' settings.
        """
        self._opened()
        lora = None if adapter is None else f"agentgym-{uuid4().hex[:12]}-v{version}"
        policy = Policy(lora, version, adapter)
        async with self._updating:
            if adapter is not None and self._config.adapters == "disk":
                await asyncio.to_thread(write_adapter, adapter, self._folder_of(policy))
            await self._spread(policy)
            old, self._policy = self._policy, policy
            overtaken = [turn.piece for turn in self._turns.values() if turn.piece is not None]
            self._counts.swapped += len(overtaken)
            for piece in overtaken:
                self._spawn(self._end(piece))
            self._spawn(self._retire(old, overtaken))

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Log-probability of each id but the first, given those before it, as `generate` would report it.

        Servers are asked in turn, so that every one of them is probed. At a temperature other than 0 and 1 this takes
        a request of one draw for each id.
        """
        ids = self._checked(token_ids)
        if len(ids) > self.context_tokens:
            raise ValueError(f"token_ids: {len(ids)} do not fit {self.context_tokens} context_tokens")
        if len(ids) == 1:
            return np.zeros(0, np.float32)
        living = self._living()
        self._probed += 1
        server = living[self._probed % len(living)]
        try:
            return await server.score(ids, sampling, self._policy)
        except ConnectionError as error:
            raise EngineError(f"score: {error}{self._last_words(server)}") from error

    async def close(self) -> None:
        """End what was launched; unanswered requests fail with EngineError. Closing twice is harmless."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    # ------------------------------------------------------------------------------------------ one turn

    async def _sample(self, turn: _Turn) -> Completion:
        """Request after request until the turn has ended by itself, or was asked to."""
        while True:
            policy = self._policy
            piece = await self._piece(turn, policy)
            turn.take(piece)
            overtaken = piece.finish_reason == "abort" and policy is not self._policy
            if turn.ending is not None or not overtaken:
                return turn.completion(piece.finish_reason, policy.version)
            if len(turn.ids) == turn.max_tokens:
                return turn.completion("length", policy.version)

    async def _piece(self, turn: _Turn, policy: Policy) -> Completion:
        """One request's answer, from whichever server can give it: nothing of it has reached the env yet."""
        failures: Counter[Server] = Counter()
        failure: Exception | None = None
        while turn.ending is None:
            server = self._place(turn, [s for s, count in failures.items() if count > 1], failure)
            try:
                return await self._request(turn, policy, server)
            except (ConnectionError, Unavailable) as error:
                failure = error
                failures[server] += 2 if isinstance(error, Unavailable) else 1
                self._counts.retried += 1
                await self._check(server)
        return Completion(
            token_ids=np.zeros(0, np.int64),
            logprobs=np.zeros(0, np.float32),
            finish_reason="abort",
            versions=(Version(0, policy.version),),
        )

    def _place(self, turn: _Turn, avoid: Sequence[Server], failure: Exception | None) -> Server:
        self._opened()
        try:
            return self._router.place(turn.session, [*turn.prompt, *turn.ids], avoid=avoid)
        except EngineError as error:
            words = "".join(map(self._last_words, self._router.servers))
            raise EngineError(f"generate: {error}{f'; {failure}' if failure else ''}{words}") from failure

    async def _request(self, turn: _Turn, policy: Policy, server: Server) -> Completion:
        piece = turn.piece = _Piece(uuid4().hex, server)
        self._counts.requests += 1
        ask = Ask(
            token_ids=[*turn.prompt, *turn.ids],
            rid=piece.rid,
            max_tokens=turn.max_tokens - len(turn.ids),
            sampling=turn.sampling,
            seed=turn.seed,
            stop_ids=self._opened().stop_ids,
            policy=policy,
        )
        try:
            completion = await server.generate(ask)
        except asyncio.CancelledError:
            self._spawn(self._end(piece))
            raise
        finally:
            piece.done.set()
            turn.piece = None
        if (
            completion.token_ids.max(initial=0) >= self._opened().vocabulary
            or len(completion.token_ids) > ask.max_tokens
        ):
            raise EngineError(f"{server}: sampled ids outside the vocabulary, or more than {ask.max_tokens}")
        return completion

    async def _end(self, piece: _Piece) -> None:
        """Make the server end a request now; it has when this returns, or nobody waits for it any more."""
        while True:
            with suppress(ConnectionError, EngineError):
                await piece.server.abort(piece.rid)
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await piece.done.wait()
            if piece.done.is_set():
                return

    # ------------------------------------------------------------------------------------------ policies

    async def _spread(self, policy: Policy) -> None:
        """Load a policy on every server, or on none."""
        living = self._living()
        folder = self._folder_of(policy) if self._config.adapters == "disk" else None
        refused = await self._each(living, lambda server: server.load(policy, folder))
        if not refused:
            self._living()
            return
        if policy.lora is not None:
            lora = policy.lora
            await self._each([s for s in self._router.alive if s not in refused], lambda server: server.unload(lora))
            self._remove(policy)
        raise next(iter(refused.values()))

    async def _retire(self, policy: Policy, overtaken: Sequence[_Piece]) -> None:
        """Unload a policy's adapter when nothing is sampled from it any more."""
        for piece in overtaken:
            await piece.done.wait()
        if policy.lora is not None:
            lora = policy.lora
            await self._each(self._router.alive, lambda server: server.unload(lora))
            self._remove(policy)

    def _folder_of(self, policy: Policy) -> Path:
        return self._folder / f"{policy.lora}"

    def _remove(self, policy: Policy) -> None:
        # A server reads an adapter that it unloaded again when it is asked for it: let there be nothing to read.
        shutil.rmtree(self._folder_of(policy), ignore_errors=True)

    # ------------------------------------------------------------------------------------------ servers

    def _living(self) -> list[Server]:
        """The servers that are not lost; EngineError where none is left."""
        self._opened()
        living = self._router.alive
        if not living:
            raise EngineError(f"no server is left{''.join(map(self._last_words, self._router.servers))}")
        return living

    async def _each(
        self, servers: Iterable[Server], ask: Callable[[Server], Awaitable[None]]
    ) -> dict[Server, ValueError]:
        """Ask all servers at once; those that refused. A server that cannot be asked is lost."""
        refused: dict[Server, ValueError] = {}

        async def one(server: Server) -> None:
            try:
                await ask(server)
            except ValueError as error:
                refused[server] = error
            except (ConnectionError, EngineError):
                self._lose(server)

        async with asyncio.TaskGroup() as asking:
            for server in servers:
                asking.create_task(one(server))
        return refused

    async def _check(self, server: Server) -> None:
        """Lose a server that does not answer."""
        if server.alive and not await server.answers(self._config.health_s):
            self._lose(server)

    def _lose(self, server: Server) -> None:
        if server.alive:
            self._counts.lost_servers += 1
            self._router.lose(server)
            server.client.close()  # what waits for its answer is sent elsewhere

    async def _revive(self, server: Server) -> None:
        """Take a lost server back once it serves again, with the current adapter."""
        with suppress(ConnectionError, EngineError, ValueError):
            if not await server.ready(self._config.health_s):
                return
            async with self._updating:
                if self._policy.lora is not None:
                    with suppress(EngineError):  # it may have forgotten it, or not
                        await server.unload(self._policy.lora)
                    on_disk = self._config.adapters == "disk"
                    await server.load(self._policy, self._folder_of(self._policy) if on_disk else None)
                self._router.revive(server)
                self._counts.revived_servers += 1

    async def _watch(self) -> None:
        """Check every server again and again."""
        while True:
            await asyncio.sleep(self._config.health_s)
            async with asyncio.TaskGroup() as checks:
                for server in self._router.servers:
                    checks.create_task(self._check(server) if server.alive else self._revive(server))

    def _last_words(self, server: Server) -> str:
        """What a server of ours said last, where it has ended."""
        process = server.process
        return "" if process is None or process.pid is not None else f"; {server} ended: {process.last_words()}"

    # ------------------------------------------------------------------------------------------ this end

    def _opened(self) -> ModelFacts:
        if self._stack is None or self._facts is None:
            raise EngineError("the engine is not open: use it inside `async with`")
        return self._facts

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        """The ids as a list of plain integers; ValueError that names the first bad one."""
        vocabulary = self._opened().vocabulary
        ids = np.array(token_ids)
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ValueError("token_ids: must be a sequence of at least one integer")
        bad = np.flatnonzero((ids < 0) | (ids >= vocabulary))
        if len(bad):
            where = int(bad[0])
            raise ValueError(f"token_ids: id {ids[where]} at position {where} is not in the vocabulary of {vocabulary}")
        plain: list[int] = ids.tolist()
        return plain

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _settle(self) -> None:
        """The first part of closing: nothing of ours runs on, and attached servers hold nothing of ours."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._config.urls and self._policy.lora is not None:
            lora = self._policy.lora
            await self._each(self._router.alive, lambda server: server.unload(lora))

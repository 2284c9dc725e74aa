"""The SGLang engine: a model behind one or several SGLang servers, asked over HTTP in token ids.

When the weights change, each request in flight is aborted, the ids that it had sampled are kept, and its turn goes on
from there under the new weights.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.engines.adapter_files import opened_adapter
from agentgym.engines.sglang.answers import ServerFacts
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.fleet import Fleet, FleetCounts
from agentgym.engines.sglang.generation import Generation, Piece
from agentgym.engines.sglang.launching.opening import facts_of, open_servers
from agentgym.engines.sglang.launching.process import Progress
from agentgym.engines.sglang.model_info import ModelFacts, model_facts, require_vocabulary
from agentgym.engines.sglang.policies.payloads import PolicyVersion
from agentgym.engines.sglang.prompts import Prompts, checked
from agentgym.engines.sglang.server import NoServer, Server, Unavailable
from agentgym.engines.sglang.turns import Turns
from agentgym.errors import EngineError
from agentgym.hub import find_model
from agentgym.machine.process_identity import lent_folder
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling
from agentgym.types.weights import Adapter, ModelWeights

__all__ = ["SGLangConfig", "SGLangEngine"]


class SGLangEngine:
    """Samples through SGLang servers; implements `Engine`, open inside `async with`.

    `model` is a folder or hub name: its files say which ids there are and which of them end a turn; None stands for
    what an attached server says it serves. Servers are those of `config.urls`, or else launched, and ended with all
    their processes however this process ends. A server that dies or hangs is lost: its requests are sent to another
    one, for nothing of them has reached an env. Without another one they wait until one is back, for
    `config.server_wait_s` at most, and then fail with EngineError.
    """

    def __init__(
        self,
        model: str | Path | None,
        config: SGLangConfig | None = None,
        *,
        tokenizer: ChatTokenizer | None = None,
        progress: Progress | None = None,
        trainers: Sequence[int] = (),
    ) -> None:
        self._trainers = tuple(trainers)
        """The GPUs that launched servers may not use."""
        self._config = config or SGLangConfig()
        if model is None and not self._config.urls:
            raise ValueError("model: name the model of the server to launch, or attach to a server with `urls`")
        self._model = None if model is None else find_model(model)
        self._tokenizer, self._progress = tokenizer, progress
        self._stack: AsyncExitStack | None = None
        self._fleet = Fleet([], self._config, Path())
        self._facts: ModelFacts | None = None
        self._served: tuple[ServerFacts, ...] = ()
        self._context_tokens = self._config.context_tokens  # the least limit that is known
        self._prompts = Prompts(0)
        self._turns = Turns(self._fleet, self._opened)

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
        if config is not None and config.urls:
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
            folder = Path(stack.enter_context(lent_folder("sglang")))
            servers = await open_servers(
                stack, self._config, self._model, folder, self._progress, trainers=self._trainers
            )
            merged = self._config.adapters == "merged"
            self._served = tuple([await facts_of(server, merged=merged) for server in servers])
            limits = [facts.context_tokens for facts in self._served]
            self._context_tokens = min([*limits, *filter(None, [self._config.context_tokens])])
            model = self._model or self._served[0].model
            self._facts = await asyncio.to_thread(model_facts, model, self._tokenizer)
            for facts in self._served:
                await asyncio.to_thread(require_vocabulary, model, self._facts.vocabulary, facts.model)
            self._prompts = Prompts(self._facts.vocabulary)
            self._fleet = Fleet(servers, self._config, folder, model, exact=self.dtype == "float32")
            self._turns = Turns(self._fleet, self._opened)
            stack.push_async_callback(self._settle)
            self._stack = stack.pop_all()
        self._turns.spawn(self._fleet.watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> ChatTokenizer:
        """How this engine's model reads and writes chats."""
        return self._tokenizer or self._opened().tokenizer

    @property
    def model_name(self) -> str:
        """The folder or the name of the model that is served."""
        return str(self._model or self._served[0].model)

    @property
    def context_tokens(self) -> int:
        """The most ids, prompt and completion together, that one request may hold on every server."""
        if self._context_tokens is None:
            raise EngineError(
                "context_tokens: known once the engine is open; set SGLangConfig.context_tokens to choose it"
            )
        return self._context_tokens

    @property
    def dtype(self) -> str:
        """The type of the servers' weights, such as float32; empty where they differ or do not say."""
        dtypes = {facts.dtype for facts in self._served}
        return dtypes.pop() if len(dtypes) == 1 else ""

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled under; 0 before the first `load_adapter`."""
        return self._fleet.policy.version

    @property
    def seeded(self) -> bool:
        """Whether a turn's seed decides its draws: servers do that under `--enable-deterministic-inference`."""
        return bool(self._served) and all(facts.seeded for facts in self._served)

    @property
    def counts(self) -> FleetCounts:
        """A copy of the counters since the engine opened."""
        return replace(self._fleet.counts)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """At most `max_tokens` ids after `token_ids`, each with the log-probability it was drawn with.

        The stop id, where one ended the turn, is the last. Where `seeded`, draws depend on the arguments and the
        weights alone. A turn that a weight swap overtakes goes on, and its `versions` tell where. Raises ValueError for
        ids outside the vocabulary, a request over the context or a session that is still generating; EngineError where
        no server can answer, or one answers what it should not. Cancelling the call ends its request on the server.
        """
        self._opened()
        if max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {max_tokens}")
        if len(token_ids) + max_tokens > self.context_tokens:
            raise ValueError(
                f"max_tokens: {len(token_ids)} ids and {max_tokens} new ones do not fit "
                f"{self.context_tokens} context_tokens"
            )
        if session in self._turns:
            raise ValueError(f"session: {session!r} is still generating")
        prompt = self._prompts.take(session, token_ids)
        turn = Generation(prompt=prompt, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed)
        return await self._turns.sample(turn)

    async def abort(self, session: str, *, keep: bool) -> None:
        """End the turn that a session is sampling, if any: its `generate` answers with finish_reason "abort".

        The answer holds what was sampled, or nothing without `keep`. A turn that ended by itself just before is
        answered as it ended, where it is to be kept. In a pause it ends when that does.
        """
        await self._turns.abort(session, keep=keep)

    async def pause(self) -> None:
        """No server samples until `resume`; turns keep their place and their KV, and further ones wait."""
        self._opened()
        await self._fleet.each(self._fleet.living, Server.pause)

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._opened()
        await self._fleet.each(self._fleet.living, Server.resume)

    async def release(self, session: str) -> None:
        """Forget a session; unknown ones are forgotten already."""
        self._fleet.router.release(session)
        self._prompts.release(session)

    async def load_adapter(self, adapter: Adapter | str | Path | None, *, version: int) -> None:
        """Sample new tokens from base plus adapter (None: the base alone), under `version` from now on.

        A path is the folder of a saved adapter, such as a run's `adapter/`; it is read here, not by the servers.
        Raises ValueError, and changes nothing, for an adapter that does not fit the model or the servers' settings;
        EngineError where no server is left, and none came back in time.
        """
        self._opened()
        await self._load(await opened_adapter(adapter), version)

    async def load_weights(self, weights: ModelWeights, *, version: int) -> None:
        """Sample new tokens from the model with these weights, under `version` from now on.

        They take the place of the servers' own. Raises ValueError, and changes nothing, where `adapters` is not
        "merged" and for weights that the model's files do not have; EngineError as `load_adapter`.
        """
        self._opened()
        await self._load(weights, version)

    async def _load(self, given: Adapter | ModelWeights | None, version: int) -> None:
        await self.hold()
        try:
            policy = await self._fleet.push(given, version=version)
        finally:
            self._fleet.open.set()
        old = self._fleet.pull(policy)
        self._turns.spawn(self._retire(old, self._turns.overtake()))

    async def hold(self) -> None:
        """Send no request until `pull` where policies are merged into the servers' weights; see `SharedEngine`."""
        if self._config.adapters == "merged":
            await self.drain()

    async def push(self, given: Adapter | ModelWeights | None, *, version: int) -> PolicyVersion:
        """Give the servers a policy, which every client may `pull`; see `SharedEngine`."""
        self._opened()
        policy = await self._fleet.push(given, version=version)
        for old in self._fleet.stale:
            if old != policy:
                self._turns.spawn(self._retire(old, []))
        return policy

    async def pull(self, policy: PolicyVersion) -> None:
        """Sample new tokens from a policy that this or another client pushed; requests in flight go on under it."""
        self._opened()
        await self._fleet.each(self._fleet.router.alive, lambda server: self._fleet.take(server, policy))
        self._fleet.pull(policy)
        self._turns.overtake()
        self._fleet.open.set()

    async def drain(self) -> None:
        """End the requests in flight, keeping what they sampled, and send none until `reopen`."""
        self._opened()
        self._fleet.open.clear()
        for piece in self._turns.overtake():
            await piece.done.wait()

    async def reopen(self) -> None:
        """Send requests again after `drain`."""
        self._fleet.open.set()

    async def release_memory(self) -> None:
        """Give the GPU memory that `colocate` names back, after every client's `drain`; EngineError where one
        cannot."""
        self._opened()
        await asyncio.gather(*(server.release_memory(self._lent) for server in self._fleet.living))

    async def resume_memory(self) -> None:
        """Take the GPU memory again; the weights are those that it had, and the KV cache is empty."""
        self._opened()
        await asyncio.gather(*(server.resume_memory(self._lent) for server in self._fleet.living))

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, for other processes to attach to."""
        return tuple(server.client.url for server in self._fleet.servers)

    def current_policy(self) -> PolicyVersion:
        """Return the policy that new tokens are sampled from, for clients in other processes to `pull`."""
        return self._fleet.policy

    def move(self, old: str, new: str) -> None:
        """Ask the server at the address `new` in the place of the one at `old`, once it serves the current policy."""
        self._fleet.move(old, new)

    @property
    def _lent(self) -> tuple[str, ...]:
        return ("kv_cache",) if self._config.colocate == "keep" else ("kv_cache", "weights")

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Log-probability of each id but the first, given those before it, as `generate` would report it.

        Of several servers the next one each time: all are probed. At a temperature but 0 and 1 it draws behind each id.
        """
        ids = checked(token_ids, self._opened().vocabulary)
        if len(ids) > self.context_tokens:
            raise ValueError(f"token_ids: {len(ids)} do not fit {self.context_tokens} context_tokens")
        if len(ids) == 1:
            return np.zeros(0, np.float32)
        attempts = self._fleet.attempts("score")
        while True:
            self._opened()
            try:
                server = self._fleet.next(avoid=attempts.avoid)
                return await server.score(ids, sampling, self._fleet.policy)
            except (ConnectionError, Unavailable) as error:
                attempts.failed(server, error)
                self._opened()
                await self._fleet.check(server)
            except NoServer as nobody:
                await attempts.wait(nobody, self._fleet.closing)

    async def close(self) -> None:
        """End the launched servers; unanswered requests fail with EngineError. Closing twice is harmless."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    async def _retire(self, policy: PolicyVersion, overtaken: Sequence[Piece]) -> None:
        """Unload a policy's adapter when nothing is sampled from it any more."""
        for piece in overtaken:
            await piece.done.wait()
        await self._fleet.unload(policy)

    def _opened(self) -> ModelFacts:
        if self._stack is None or self._facts is None:
            raise EngineError("the engine is not open: use it inside `async with`")
        return self._facts

    async def _settle(self) -> None:
        """End all background work and requests, and take from attached servers what this engine gave them."""
        self._fleet.closing.set()
        await self._turns.close()
        for server in self._fleet.servers:
            await server.close()  # a server ends the requests of a closed connection
        if self._config.urls:
            await self._fleet.unload_all()
            await self._fleet.set_back()

"""The SGLang engine: a model behind one or more SGLang servers, queried over HTTP with token ids.

When the weights change, each request in flight is aborted. Its sampled ids are kept, and its turn continues from
there under the new weights.
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
    """Samples through SGLang servers. It implements `Engine`; use it inside `async with`.

    The engine attaches to the servers in `config.urls`, or launches servers. Launched servers and all their processes
    are terminated when this process ends, no matter how it ends. If a server dies or hangs, its requests are sent to
    another server, which is safe because none of their results has reached an env. If there is no other server,
    requests wait at most `config.server_wait_s` seconds for one to come back, and then fail with EngineError.

    Args:
        model: A folder or hub name, whose files define the vocabulary and the stop ids. None uses the model that an
            attached server reports.
        config: Settings of the engine and its servers; None for the defaults.
        tokenizer: The chat tokenizer; None loads the model's.
        progress: Called with a short message about each launched server's startup.
        trainers: Indices of the GPUs that training uses, among those that this process sees. Launched servers may use
            them only if `config.colocate` is "keep" or "drop".

    Raises:
        ValueError: If there is neither a model to launch nor a server to attach to.
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
        """Indices of the trainers' GPUs."""
        self._config = config or SGLangConfig()
        if model is None and not self._config.urls:
            raise ValueError("model: name the model of the server to launch, or attach to a server with `urls`")
        self._model = None if model is None else find_model(model)
        self._tokenizer, self._progress = tokenizer, progress
        self._stack: AsyncExitStack | None = None
        self._fleet = Fleet([], self._config, Path())
        self._facts: ModelFacts | None = None
        self._served: tuple[ServerFacts, ...] = ()
        self._context_tokens = self._config.context_tokens  # the lowest known limit
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
        """Create an engine that launches its servers when it opens, and owns them.

        Args:
            model: Folder or hub name of the model to serve.
            config: Settings without `urls`; None for the defaults.
            tokenizer: The chat tokenizer; None loads the model's.
            progress: Called with a short message about each server's startup.

        Raises:
            ValueError: If the config has `urls`.
        """
        if config is not None and config.urls:
            raise ValueError(
                f"urls: {list(config.urls)} are already running, so they cannot be launched; use SGLangEngine.attach"
            )
        return cls(model, config, tokenizer=tokenizer, progress=progress)

    @classmethod
    def attach(
        cls,
        *urls: str,
        model: str | Path | None = None,
        config: SGLangConfig | None = None,
        tokenizer: ChatTokenizer | None = None,
    ) -> Self:
        """Create an engine for servers that are already running, and that keep running when the engine closes.

        Args:
            *urls: The servers, as http://host:port.
            model: Folder or hub name of the served model; None uses the one that a server reports.
            config: Settings, of which `urls` is ignored; None for the defaults.
            tokenizer: The chat tokenizer; None loads the model's.

        Raises:
            ValueError: If no URL is given.
        """
        if not urls:
            raise ValueError("urls: expected at least one server, got none")
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
        """The chat tokenizer of this engine's model."""
        return self._tokenizer or self._opened().tokenizer

    @property
    def model_name(self) -> str:
        """Folder or name of the served model."""
        return str(self._model or self._served[0].model)

    @property
    def context_tokens(self) -> int:
        """Maximum number of ids, prompt and completion together, in one request to any of the servers.

        Raises:
            EngineError: If the engine isn't open yet and the config doesn't set it.
        """
        if self._context_tokens is None:
            raise EngineError(
                "context_tokens: unknown until the engine is open; open it, or set SGLangConfig.context_tokens"
            )
        return self._context_tokens

    @property
    def dtype(self) -> str:
        """The dtype of the servers' weights, such as float32; empty if they differ or don't report it."""
        dtypes = {facts.dtype for facts in self._served}
        return dtypes.pop() if len(dtypes) == 1 else ""

    @property
    def version(self) -> int:
        """Policy version of tokens sampled from now on; 0 before the first `load_adapter`."""
        return self._fleet.policy.version

    @property
    def seeded(self) -> bool:
        """Whether a turn's seed determines its samples, as it does with `--enable-deterministic-inference`."""
        return bool(self._served) and all(facts.seeded for facts in self._served)

    @property
    def counts(self) -> FleetCounts:
        """A copy of the counters since the engine opened."""
        return replace(self._fleet.counts)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """Sample at most `max_tokens` ids after `token_ids`, each with the log-probability it was drawn with.

        If a stop id ended the turn, it is the last id. If the engine is `seeded`, samples depend only on the
        arguments and the weights. If the weights change during a turn, the turn continues, and its `versions` give
        the index of the first id under the new weights. Cancelling the call aborts its request on the server.

        Args:
            token_ids: The prompt, any sequence of integers.
            session: Name of the growing context, which stays on one server as long as that server is available.
            max_tokens: Maximum number of ids to sample.
            sampling: Sampling parameters.
            seed: Seed of the sampling; see `seeded`.

        Raises:
            ValueError: If ids are outside the vocabulary, the request exceeds the context, or the session is still
                generating.
            EngineError: If no server can respond, or a response is invalid.
        """
        self._opened()
        if max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {max_tokens}")
        if len(token_ids) + max_tokens > self.context_tokens:
            raise ValueError(
                f"max_tokens: {len(token_ids)} ids and {max_tokens} new ones exceed context_tokens, "
                f"which is {self.context_tokens}"
            )
        if session in self._turns:
            raise ValueError(f"session: {session!r} is still generating; wait for it, or use another session")
        prompt = self._prompts.take(session, token_ids)
        turn = Generation(prompt=prompt, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed)
        return await self._turns.sample(turn)

    async def abort(self, session: str, *, keep: bool) -> None:
        """End the turn that a session is sampling, if any. Its `generate` then returns with finish_reason "abort".

        If the turn has just finished normally and `keep` is true, `generate` returns the turn's own finish reason.
        During a pause, the turn ends when the pause does.

        Args:
            session: The session whose turn to end.
            keep: Whether `generate` returns the ids sampled so far, or none.
        """
        await self._turns.abort(session, keep=keep)

    async def pause(self) -> None:
        """Stop sampling on all servers until `resume`. Turns keep their state and KV, and new turns wait."""
        self._opened()
        await self._fleet.each(self._fleet.living, Server.pause)

    async def resume(self) -> None:
        """Continue sampling after `pause`."""
        self._opened()
        await self._fleet.each(self._fleet.living, Server.resume)

    async def release(self, session: str) -> None:
        """Forget a session. Unknown sessions are ignored.

        Args:
            session: The name that was passed to `generate`.
        """
        self._fleet.router.release(session)
        self._prompts.release(session)

    async def load_adapter(self, adapter: Adapter | str | Path | None, *, version: int) -> None:
        """Sample new tokens from the base model plus an adapter.

        Args:
            adapter: The adapter, or the folder of a saved one, such as a run's `adapter/`, which this process reads,
                not the servers. None for the base model alone.
            version: Policy version of tokens sampled from now on.

        Raises:
            ValueError: If the adapter doesn't fit the model or the servers' settings, in which case nothing changes.
            EngineError: If no server is left, and none came back in time.
        """
        self._opened()
        await self._load(await opened_adapter(adapter), version)

    async def load_weights(self, weights: ModelWeights, *, version: int) -> None:
        """Sample new tokens from the model with these weights, which replace the servers' weights.

        Args:
            weights: The weights. Only `files` is sent to the servers: tensors by their names in the model's files.
            version: Policy version of tokens sampled from now on.

        Raises:
            ValueError: If `adapters` isn't "merged", or the model's files don't have these weights, in which case
                nothing changes.
            EngineError: If no server is left, and none came back in time.
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
        """Send no requests until `pull`, if policies are merged into the servers' weights; see `SharedEngine`."""
        if self._config.adapters == "merged":
            await self.drain()

    async def push(self, given: Adapter | ModelWeights | None, *, version: int) -> PolicyVersion:
        """Upload a policy to the servers, which every client may `pull`; see `SharedEngine`.

        Args:
            given: An adapter or whole weights; None for the base model.
            version: Policy version of the upload.

        Returns:
            The policy, for `pull`. It can be pickled.

        Raises:
            ValueError: If the adapter or the weights don't fit the model or the servers' settings, in which case
                nothing changes.
            EngineError: If no server is left, and none came back in time.
        """
        self._opened()
        policy = await self._fleet.push(given, version=version)
        for old in self._fleet.stale:
            if old != policy:
                self._turns.spawn(self._retire(old, []))
        return policy

    async def pull(self, policy: PolicyVersion) -> None:
        """Sample new tokens from a policy that this or another client pushed.

        Requests in flight are aborted. Their sampled ids are kept, and their turns continue under the new policy.

        Args:
            policy: The return value of `push`.
        """
        self._opened()
        await self._fleet.each(self._fleet.router.alive, lambda server: self._fleet.take(server, policy))
        self._fleet.pull(policy)
        self._turns.overtake()
        self._fleet.open.set()

    async def drain(self) -> None:
        """Abort the requests in flight, keep the ids that they sampled, and send no requests until `reopen`."""
        self._opened()
        self._fleet.open.clear()
        for piece in self._turns.overtake():
            await piece.done.wait()

    async def reopen(self) -> None:
        """Send requests again after `drain`."""
        self._fleet.open.set()

    async def release_memory(self) -> None:
        """Release the servers' GPU memory for the trainer (see `colocate`).

        Before that, `drain` must be called on every engine that uses these servers, including those of other processes.

        Raises:
            EngineError: If a server can't release it.
        """
        self._opened()
        await asyncio.gather(*(server.release_memory(self._lent) for server in self._fleet.living))

    async def resume_memory(self) -> None:
        """Reclaim the released GPU memory. The weights are the same as before, and the KV cache is empty."""
        self._opened()
        await asyncio.gather(*(server.resume_memory(self._lent) for server in self._fleet.living))

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the servers, for other processes to attach to."""
        return tuple(server.client.url for server in self._fleet.servers)

    def current_policy(self) -> PolicyVersion:
        """Return the policy that new tokens are sampled from, for clients in other processes to `pull`."""
        return self._fleet.policy

    def move(self, old: str, new: str) -> None:
        """Use the server at the URL `new` instead of the one at `old`, as soon as it serves the current policy.

        Args:
            old: URL of the server to replace.
            new: URL of its replacement.
        """
        self._fleet.move(old, new)

    @property
    def _lent(self) -> tuple[str, ...]:
        return ("kv_cache",) if self._config.colocate == "keep" else ("kv_cache", "weights")

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Return the log-probability of each id except the first, given the ids before it.

        These are the values that `generate` would report. With several servers, each call uses the next server, so that
        repeated calls reach all of them. At a temperature other than 0 and 1, the server scores by sampling once after
        each prefix of the ids.

        Args:
            token_ids: The ids to score.
            sampling: Sampling parameters; only the temperature matters.

        Raises:
            ValueError: If ids are outside the vocabulary, or too many for the context.
            EngineError: If no server can respond, or a response is invalid.
        """
        ids = checked(token_ids, self._opened().vocabulary)
        if len(ids) > self.context_tokens:
            raise ValueError(f"token_ids: {len(ids)} ids exceed context_tokens, which is {self.context_tokens}")
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
        """Terminate the launched servers. Pending requests fail with EngineError. Closing twice is harmless."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    async def _retire(self, policy: PolicyVersion, overtaken: Sequence[Piece]) -> None:
        """Unload a policy's adapter as soon as the `overtaken` requests, which still use the policy, have ended."""
        for piece in overtaken:
            await piece.done.wait()
        await self._fleet.unload(policy)

    def _opened(self) -> ModelFacts:
        if self._stack is None or self._facts is None:
            raise EngineError("the engine is not open: use it inside `async with`")
        return self._facts

    async def _settle(self) -> None:
        """End all background work and requests, and remove this engine's policies from attached servers."""
        self._fleet.closing.set()
        await self._turns.close()
        for server in self._fleet.servers:
            await server.close()  # a server aborts the requests of a closed connection
        if self._config.urls:
            await self._fleet.unload_all()
            await self._fleet.set_back()

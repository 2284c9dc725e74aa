"""The embedded engine: a transformers model in a thread of this process, without a server."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np

from agentgym.chat.tokenizer import ChatTokenizer, chat_tokenizer
from agentgym.config_fields import Name, Positive, config
from agentgym.engines.adapter_files import opened_adapter
from agentgym.engines.fingerprint import chat_digest, digest_of, weights_digest
from agentgym.engines.sglang.prompts import holds_bool
from agentgym.engines.stop_texts import StopTexts
from agentgym.errors import EngineError
from agentgym.errors.extras import needs_extra
from agentgym.hub import find_model
from agentgym.types.arrays import Floats, Ints
from agentgym.types.completion import Completion, Sampling
from agentgym.types.weights import Adapter, ModelWeights

if TYPE_CHECKING:  # torch is loaded when an engine opens, not when a config is created
    from agentgym.engines.transformers.batcher import Batcher, Stats
    from agentgym.engines.transformers.model import EngineMemory


@config(frozen=True, kw_only=True)
class TransformersConfig:
    """Settings of the embedded engine. The defaults suit a small model on one CPU core."""

    slots: Positive = 64
    """Maximum number of turns that are sampled at once; other turns wait. Each slot has memory for the KV cache of a
    whole context.
    """
    context_tokens: Positive | None = None
    """Maximum number of ids in a session, prompt and completion together. If None, as many as the model has positions,
    limited so that the KV of all slots fits in a quarter of the machine's memory or an eighth of the GPU's, or in 1 GiB
    if that is more. The limit is at least 512 ids, if the model has as many positions.
    """
    prefill_tokens: Positive = 1024
    """Maximum number of ids, including padding, in a forward pass that computes prompts (prefill). It limits how long
    other turns wait for that pass before they sample their next id.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of weights and KV if the engine loads the model. auto is bfloat16 on a GPU that supports it, and
    float32 elsewhere. Log-probabilities are always float32.
    """
    device: Name = "auto"
    """The device to load the model to: auto (a GPU if there is one), or a torch device. Under torchrun, each process
    uses the GPU of its local rank.
    """
    threads: Positive | None = None
    """Number of CPU threads that torch uses in the whole process. If None, a model of more than 50 million weights on a
    CPU uses all processors that the process may use (OMP_NUM_THREADS, if that is set), and any other model uses one.
    """


class _Command(NamedTuple):
    run: Callable[["Batcher"], object]
    """A function that the engine's thread calls between two steps.

    It returns the command's result, or `_LATER` if a later step reports the result.
    """
    settle: Callable[[object], None]


_LATER = object()


class TransformersEngine:
    """Samples in a separate thread with continuous batching. It implements `Engine`; use it inside `async with`.

    A turn ends at any id that the model's generation config or the loaded tokenizer defines as an end token.

    Args:
        model: A folder or hub name of a transformers causal language model and its tokenizer, or a loaded model. The
            engine takes over a loaded model: it merges adapters into the weights.
        config: Settings of the engine; None for the defaults.
        tokenizer: The chat tokenizer, which is required with a loaded model; None loads the one in the model's
            folder.

    Raises:
        ValueError: If a loaded model is passed without a tokenizer.
    """

    def __init__(
        self, model: Any, config: TransformersConfig | None = None, *, tokenizer: ChatTokenizer | None = None
    ) -> None:
        if tokenizer is None and not isinstance(model, str | Path):
            raise ValueError("tokenizer: a loaded model needs one; pass tokenizer=...")
        self._model = find_model(model) if isinstance(model, str | Path) else model
        self._config = config or TransformersConfig()
        self._tokenizer = tokenizer
        self._adapter = ""
        """Folder of the loaded adapter; "" if there is no adapter, or one that didn't come from a folder."""
        self._weights = self._policy = ""
        """Digests of the model as it was first loaded, and of the adapter or weights loaded since."""
        self._inbox: SimpleQueue[_Command | None] = SimpleQueue()
        self._batcher: Batcher | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._batcher = await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._run, args=(self._batcher,), name="agentgym-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The chat tokenizer of this engine's model.

        Raises:
            EngineError: If the engine isn't open yet and no tokenizer was passed to it.
        """
        if self._tokenizer is None:
            raise EngineError("the engine is not open: use it inside `async with`, or pass a tokenizer")
        return self._tokenizer

    @property
    def context_tokens(self) -> int:
        """Maximum number of ids in one request, prompt and completion together.

        Raises:
            EngineError: If the engine isn't open yet and the config doesn't set it.
        """
        if self._config.context_tokens is not None:
            return self._config.context_tokens
        if self._batcher is None:
            raise EngineError(
                "context_tokens: unknown until the engine is open; open it, or set TransformersConfig.context_tokens"
            )
        return self._batcher.policy.context

    @property
    def model_name(self) -> str:
        """The model's folder or name, followed by the adapter's folder if there is one.

        If the engine was given a loaded model, the model's name is the one that it was loaded by.
        """
        model = str(getattr(self._model, "name_or_path", self._model))
        return f"{model} with {self._adapter}" if self._adapter else model

    @property
    def config(self) -> TransformersConfig:
        """The engine's settings. In an open engine, those whose default depends on the model have values."""
        return self._config

    @property
    def dtype(self) -> str:
        """The dtype of the model's weights, such as float32."""
        return self._opened().policy.dtype

    @property
    def memory(self) -> "EngineMemory":
        """The bytes of the open engine's weights and of its KV cache if all slots are full."""
        return self._opened().policy.memory

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a turn in the open engine."""
        return self._opened().stop_ids

    @property
    def version(self) -> int:
        """Policy version of tokens sampled from now on; 0 before the first `load_adapter`."""
        return 0 if self._batcher is None else self._batcher.version

    @property
    def stats(self) -> "Stats":
        """A copy of the counters since the engine opened."""
        return replace(self._opened().stats)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """Sample at most `max_tokens` ids after `token_ids`, each with the log-probability it was drawn with.

        If a stop id ended the turn, it is the last id. The sampled ids depend on the arguments and the weights, not
        on other requests that run at the same time (except for float noise). If the weights change during a turn, the
        turn continues, and its `versions` give the index of the first id under the new weights.

        Args:
            token_ids: The prompt, any sequence of integers.
            session: Name of the growing context, whose KV is reused.
            max_tokens: Maximum number of ids to sample.
            sampling: Sampling parameters.
            seed: Seed of the sampling.

        Raises:
            ValueError: If ids are outside the vocabulary, the request exceeds the context, or the session is still
                generating.
            EngineError: If the engine is closed, or its thread failed.
        """
        from agentgym.engines.transformers.batcher import Batcher, Request

        ids = self._checked(token_ids)
        if max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {max_tokens}")
        if len(ids) + max_tokens > self.context_tokens:
            raise ValueError(
                f"max_tokens: {len(ids)} ids and {max_tokens} new ones exceed context_tokens, which is "
                f"{self.context_tokens}"
            )
        future, settle = _mailbox()
        stops = StopTexts.of(self.tokenizer, sampling)
        request = Request(ids, session, max_tokens, sampling, seed, settle, stops)
        self._post(partial(_later, Batcher.submit, request=request), settle)
        try:
            completion: Completion = await future
        finally:
            if future.cancelled():
                with suppress(EngineError):
                    self._post(partial(Batcher.cancel, request=request), _ignore)
        return completion

    async def release(self, session: str) -> None:
        """Forget a session. Unknown sessions are ignored.

        Args:
            session: The name that was passed to `generate`.
        """
        await self._ask(lambda batcher: batcher.release(session))

    async def load_adapter(self, adapter: Adapter | str | Path | None, *, version: int) -> None:
        """Sample new tokens from the base model plus an adapter.

        The weights change between two steps. A turn that has sampled ids continues with its KV; all other KV is
        recomputed.

        Args:
            adapter: The adapter, or the folder of a saved one, such as a run's `adapter/`. None restores exactly the
                base model.
            version: Policy version of tokens sampled from now on.

        Raises:
            ValueError: If the adapter doesn't fit the model, in which case nothing changes.
        """
        self._opened()
        read = await opened_adapter(adapter)
        digest = await asyncio.to_thread(digest_of, read)
        await self._ask(lambda batcher: batcher.load_adapter(read, version))
        self._policy = digest
        self._adapter = str(adapter) if isinstance(adapter, str | Path) else ""

    async def load_weights(self, weights: ModelWeights, *, version: int) -> None:
        """Sample new tokens from the model with these weights, as `load_adapter` does with an adapter.

        Args:
            weights: Tensors by name. Weights that aren't included have the model's original values.
            version: Policy version of tokens sampled from now on.

        Raises:
            ValueError: If the model doesn't have these weights, in which case nothing changes.
        """
        self._opened()
        digest = await asyncio.to_thread(digest_of, weights)
        await self._ask(lambda batcher: batcher.load_weights(weights, version))
        self._adapter, self._policy = "", digest

    async def fingerprint(self) -> dict[str, str]:
        """Return a digest of each component that determines the engine's output, or {} if the engine isn't open."""
        if self._batcher is None:
            return {}
        own = {"weights": self._weights, "adapter": self._policy, "chat": chat_digest(self.tokenizer)}
        return own | {"context_tokens": str(self.context_tokens)}

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Return the log-probability of each id except the first, given the ids before it, from a plain forward pass.

        Args:
            token_ids: The ids to score.
            sampling: Sampling parameters; only the temperature matters.

        Raises:
            ValueError: If ids are outside the vocabulary, or too many for the context.
        """
        ids = self._checked(token_ids)
        if len(ids) > self.context_tokens:
            raise ValueError(f"token_ids: {len(ids)} ids exceed context_tokens, which is {self.context_tokens}")
        if len(ids) == 1:
            return np.zeros(0, np.float32)
        scores: Floats = await self._ask(lambda batcher: batcher.policy.score(ids, sampling.temperature))
        return scores

    async def close(self) -> None:
        """Stop the thread. Pending requests fail with EngineError. Closing twice is harmless."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(thread.join)

    def _opened(self) -> "Batcher":
        if self._batcher is None or self._thread is None:
            raise EngineError("the engine is not open: use it inside `async with`")
        return self._batcher

    def _checked(self, token_ids: Sequence[int]) -> Ints:
        """Return a copy of the ids as an array.

        Raises:
            ValueError: If there are no ids, or one is invalid. The message names the first such id.
        """
        vocabulary = self._opened().policy.vocabulary
        ids = np.array(token_ids)
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu" or holds_bool(token_ids):
            raise ValueError("token_ids: must be a sequence of at least one integer")
        bad = np.flatnonzero((ids < 0) | (ids >= vocabulary))
        if len(bad):
            where = int(bad[0])
            raise ValueError(
                f"token_ids: id {ids[where]} at position {where} is not in the vocabulary of {vocabulary} ids"
            )
        return ids.astype(np.int64)

    def _post(self, run: Callable[["Batcher"], object], settle: Callable[[object], None]) -> None:
        self._opened()
        self._inbox.put(_Command(run, settle))

    async def _ask(self, run: Callable[["Batcher"], object]) -> Any:
        future, settle = _mailbox()
        self._post(run, settle)
        return await future

    def _load(self) -> "Batcher":
        """Load the model. This is slow, so it runs outside the event loop."""
        with needs_extra():
            from agentgym.engines.transformers.batcher import Batcher
            from agentgym.engines.transformers.model import InferenceModel, find_defaults, load_model, stop_ids

        config, model = self._config, self._model
        if self._tokenizer is None:
            self._tokenizer = chat_tokenizer(model)
        stops = getattr(self._tokenizer, "stop_ids", frozenset[int]())
        if isinstance(model, str | Path):
            model = load_model(model, dtype=config.dtype, device=config.device)
        self._weights = weights_digest(model)
        found = find_defaults(model, config.slots)
        context, threads = config.context_tokens or found.context_tokens, config.threads or found.threads
        policy = InferenceModel(model, slots=config.slots, context=context, threads=threads)
        self._config = replace(config, context_tokens=context, threads=threads)
        return Batcher(
            policy,
            slots=config.slots,
            prefill_tokens=config.prefill_tokens,
            stop_ids=frozenset(stops | stop_ids(model)),
        )

    def _run(self, batcher: "Batcher") -> None:
        """Run commands and steps until the engine closes. This is the main function of the engine's thread.

        Every request is settled, even if the thread fails.
        """
        try:
            while self._run_commands(batcher):
                batcher.step()
        except BaseException as error:  # No caller could catch this error, so the requests get it.
            batcher.fail_all(partial(_broken, error))
            while (command := self._inbox.get()) is not None:
                command.settle(_broken(error))
        else:
            batcher.fail_all(lambda: EngineError("the engine was closed"))

    def _run_commands(self, batcher: "Batcher") -> bool:
        """Run the queued commands, waiting for one if nothing is being sampled. Return False when the engine closes."""
        wait = not batcher.busy
        while True:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return True
            if command is None:
                return False
            _run_command(batcher, command)
            wait = not batcher.busy


def _run_command(batcher: "Batcher", command: _Command) -> None:
    try:
        answer = command.run(batcher)
    except (ValueError, EngineError) as error:
        answer = error
    except BaseException as error:
        command.settle(_broken(error))
        raise
    if answer is not _LATER:
        command.settle(answer)


def _later(submit: Callable[..., None], batcher: "Batcher", **arguments: Any) -> object:
    submit(batcher, **arguments)
    return _LATER


def _broken(cause: BaseException) -> EngineError:
    error = EngineError(f"the engine's thread failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _mailbox() -> tuple[asyncio.Future[Any], Callable[[object], None]]:
    """Return a future of the running event loop, and a function that settles it from another thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(answer: object) -> None:
        with suppress(RuntimeError):  # the event loop is closed, so nothing awaits the future
            loop.call_soon_threadsafe(_settle, future, answer)

    return future, settle


def _settle(future: asyncio.Future[Any], answer: object) -> None:
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _ignore(_: object) -> None:
    """Drop the result of a command that nothing waits for."""

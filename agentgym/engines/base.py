"""The protocol of engines: token ids in, token ids and their log-probabilities out."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling
from agentgym.types.weights import Adapter, ModelWeights


class Engine(Protocol):
    """Samples from one model; all methods are safe to call concurrently from one event loop."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The chat tokenizer of this engine's model."""
        ...

    @property
    def context_tokens(self) -> int:
        """The most ids, prompt and completion together, that one request may hold."""
        ...

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled under."""
        ...

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """Sample at most `max_tokens` ids after `token_ids`, each with the log-probability it was drawn with.

        `token_ids` is any sequence of integers, and the engine must not change it. A rollout gives a read-only
        `memoryview` of format "q", eight bytes an id: it costs no copy, numpy and torch read it as it is, and what it
        shows never changes, so it may be kept; while it is kept, the rollout goes on in a copy. The array behind it
        (`token_ids.obj`) only grows. `list(token_ids)` where a list is needed, as by JSON, by pickle and in comparisons
        with lists.

        A session is one growing context: what an earlier call of it already computed is kept. The ids drawn
        depend on `token_ids`, `sampling`, `seed` and the weights, not on what else is being generated.
        Raises ValueError for ids outside the vocabulary or a request over the context, EngineError where
        the engine cannot answer. Cancelling the call frees its place.
        """
        ...

    async def release(self, session: str) -> None:
        """Forget a session; unknown ones are forgotten already."""
        ...

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        """Sample new tokens from base plus adapter (None: the base alone), under `version`."""
        ...

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Return the log-probability of each id but the first, given those before it, as `generate` would report it."""
        ...


@runtime_checkable
class WeightsEngine(Protocol):
    """An engine that takes the weights of a whole model too, as training without an adapter makes them."""

    async def load_weights(self, weights: ModelWeights, *, version: int) -> None:
        """Sample new tokens from the model with these weights, under `version`; `load_adapter` takes them back.

        Weights that are not given are the model's own. Raises ValueError, and changes nothing, for weights of another
        model.
        """
        ...


@runtime_checkable
class SharedEngine(Protocol):
    """An engine on servers that other clients ask too: one of them pushes a policy, and all pull it.

    `load_adapter` of such an engine is `hold`, `push` and `pull` of one client.
    """

    async def hold(self) -> None:
        """Send no request until `pull`, where a push changes what the requests of all clients are sampled from.

        Requests in flight are ended; what they sampled is kept, and their turns go on afterward. It does nothing where
        each policy has a name of its own on the servers.
        """
        ...

    async def push(self, given: Adapter | ModelWeights | None, *, version: int) -> Any:
        """Give the servers a policy, which nobody samples from yet; return what `pull` takes, which can be pickled.

        The policies before the current one are unloaded: all clients must have pulled that. Raises ValueError, and
        changes nothing, for an adapter or weights that do not fit.
        """
        ...

    async def pull(self, policy: Any) -> None:
        """Sample new tokens from a policy that this or another client pushed."""
        ...


def model_name(engine: Any) -> str:
    """Return the folder or the name of an engine's model, or its class where it has no `model_name`."""
    return own_model_name(engine) or type(engine).__name__


def own_model_name(engine: Any) -> str:
    """Return the folder or the name of an engine's model; "" where the engine does not say it."""
    return str(getattr(engine, "model_name", ""))


def check_engine(engine: Any) -> None:
    """Raise TypeError where something else is given as an engine, such as the name of a model or a list of replies."""
    if isinstance(engine, type) or not callable(getattr(engine, "generate", None)):
        got = f"the class {engine.__name__}, without ()" if isinstance(engine, type) else f"{engine!r:.80}"
        raise TypeError(
            f"engine: must be an engine, got {got}; open one with `async with ag.TransformersEngine(MODEL) as engine`, "
            f"or in a test give `agentgym.testing.Scripted([say(...), ...])`"
        )


def weights_engine(engine: Engine) -> WeightsEngine:
    """Return an engine that takes whole models as one; ValueError that says what to do about another one."""
    if not isinstance(engine, WeightsEngine):
        raise ValueError(
            f"train.method: full gives the engine a whole model, and {type(engine).__name__} has no `load_weights`; "
            "give it that method, train with method='lora', or sample with the embedded engine or SGLang"
        )
    return engine

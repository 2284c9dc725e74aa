"""The protocols of engines, which take token ids and return token ids with their log-probabilities."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling
from agentgym.types.weights import Adapter, ModelWeights


class Engine(Protocol):
    """Samples from one model. All methods may be called concurrently from one event loop."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of this engine's model, with its chat template."""
        ...

    @property
    def context_tokens(self) -> int:
        """Maximum number of ids in one request, prompt and completion together."""
        ...

    @property
    def version(self) -> int:
        """Policy version of tokens sampled from now on."""
        ...

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """Sample at most `max_tokens` ids after `token_ids`, each with the log-probability it was drawn with.

        A session is one growing context, for which the engine reuses the computation of earlier calls. The sampled ids
        depend on `token_ids`, `sampling`, `seed` and the weights, not on other requests that run at the same time.
        Cancelling the call frees its slot.

        A rollout passes `token_ids` as a read-only `memoryview` of format "q", eight bytes per id, which NumPy and
        torch read without a copy. It shows the rollout's array of ids, `token_ids.obj`, to which the rollout only
        ever appends. The engine may keep a reference to the view, because the view's contents never change: while the
        engine keeps it, the rollout appends to a copy of the array instead. Call `list(token_ids)` if you need a
        list, for example for JSON, for pickle or to compare with a list.

        Args:
            token_ids: The prompt, any sequence of integers. The engine must not change it.
            session: Name of the growing context.
            max_tokens: Maximum number of ids to sample.
            sampling: Sampling parameters.
            seed: Seed of the sampling.

        Raises:
            ValueError: If ids are outside the vocabulary, or the request exceeds the context.
            EngineError: If the engine can't generate.
        """
        ...

    async def release(self, session: str) -> None:
        """Forget a session. Unknown sessions are ignored.

        Args:
            session: The name that was passed to `generate`.
        """
        ...

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        """Sample new tokens from the base model plus an adapter.

        Args:
            adapter: The adapter; None for the base model alone.
            version: Policy version of tokens sampled from now on.
        """
        ...

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Return the log-probability of each id except the first, given the ids before it.

        These are the values that `generate` would report.

        Args:
            token_ids: The ids to score.
            sampling: Sampling parameters that the ids were or would be drawn with.
        """
        ...


@runtime_checkable
class WeightsEngine(Protocol):
    """An engine that can also load all weights of a model, as training without an adapter produces them."""

    async def load_weights(self, weights: ModelWeights, *, version: int) -> None:
        """Sample new tokens from the model with these weights.

        A later `load_adapter` first restores the original weights.

        Args:
            weights: Tensors by name. Weights that aren't included have the model's original values.
            version: Policy version of tokens sampled from now on.

        Raises:
            ValueError: If the weights belong to a different model, in which case nothing changes.
        """
        ...


@runtime_checkable
class SharedEngine(Protocol):
    """An engine on servers that several clients share, such as the processes of a training run.

    One client pushes each policy, and every client pulls it. For a single client, `load_adapter` does all three steps:
    `hold`, `push` and `pull`.
    """

    async def hold(self) -> None:
        """Stop sending requests until `pull`, because a push may replace the weights that all clients sample from.

        Requests in flight are aborted. Their sampled tokens are kept, and their turns continue after the pull. If each
        policy has a separate name on the servers, a push replaces nothing, and this method does nothing.
        """
        ...

    async def push(self, given: Adapter | ModelWeights | None, *, version: int) -> Any:
        """Upload a policy to the servers without sampling from it yet.

        This also unloads every policy older than the one that the caller samples from at present. Before a push,
        every client must therefore have pulled the policy that was pushed before.

        Args:
            given: An adapter or whole weights; None for the base model.
            version: Policy version of the upload.

        Returns:
            The argument for `pull`. It can be pickled.

        Raises:
            ValueError: If the adapter or the weights don't fit the model, in which case nothing changes.
        """
        ...

    async def pull(self, policy: Any) -> None:
        """Sample new tokens from a policy that this or another client pushed.

        Args:
            policy: The return value of `push`.
        """
        ...


def model_name(engine: Any) -> str:
    """Return the folder or name of an engine's model, or the name of the engine's class if it has no `model_name`."""
    return own_model_name(engine) or type(engine).__name__


def own_model_name(engine: Any) -> str:
    """Return the folder or name of an engine's model, or "" if the engine has no `model_name`."""
    return str(getattr(engine, "model_name", ""))


def check_engine(engine: Any) -> None:
    """Raise TypeError if the value isn't an engine but, for example, a model's name or a list of replies."""
    if isinstance(engine, type) or not callable(getattr(engine, "generate", None)):
        got = f"the class {engine.__name__}, without ()" if isinstance(engine, type) else f"{engine!r:.80}"
        raise TypeError(
            f"engine: must be an engine, got {got}; open one with `async with ag.TransformersEngine(MODEL) as engine`, "
            f"or in a test pass `agentgym.testing.Scripted([say(...), ...])`"
        )


def weights_engine(engine: Engine) -> WeightsEngine:
    """Return the engine as a WeightsEngine, which can load whole models.

    Raises:
        ValueError: If the engine can't load whole models. The message says what to do.
    """
    if not isinstance(engine, WeightsEngine):
        raise ValueError(
            "train.method: full loads a whole model into the engine, but "
            f"{type(engine).__name__} has no `load_weights`; add that method, train with method='lora', or sample with "
            "the embedded engine or SGLang"
        )
    return engine

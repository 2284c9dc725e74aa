"""Defaults that follow the model and the machine, for the trainer and the embedded engine.

docs/defaults.md has them as a table, with the sources of the values.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Method: TypeAlias = Literal["lora", "full"]
Device: TypeAlias = Literal["cpu", "cuda"]

TINY_RATE = 2e-3
"""Learning rate of the tiny models that come with the library, with either method."""
RATE: dict[Method, float] = {"lora": 1e-4, "full": 1e-6}
"""Learning rate of all other models, by method."""
LARGE = 50_000_000
"""Number of weights above which a model counts as large: it computes with all processors, and unusual settings of its
training are warned of.
"""
MOST_TOKENS = 16_384
"""Maximum default number of tokens in a micro-batch. More tokens make no step faster."""
LEAST_TOKENS = 256
"""Minimum default number of tokens in a micro-batch. With fewer tokens, matrix products are slow."""
CPU_ACTIVATIONS = 2 << 30
"""Maximum memory of a default micro-batch on a CPU, in bytes. More makes steps slower, because the memory has to be
fetched from the operating system each time.
"""
KV_SHARE: dict[Device, int] = {"cpu": 4, "cuda": 8}
"""The KV of all slots of the embedded engine takes at most one part in so many of the memory. A CPU's memory is only
taken when it is written.
"""
KV_BYTES = 1 << 30
"""Memory that the KV of all slots may take on any machine."""
LEAST_CONTEXT = 512
"""Minimum default context in tokens, if the model has as many positions."""
ACTIVATION_SHARE: dict[Device, int] = {"cpu": 8, "cuda": 4}
"""The default micro-batch takes one part in so many of the memory of the machine or the GPU."""
OVERHEAD: dict[Device, float] = {"cpu": 2.0, "cuda": 1.15}
"""Peak memory of a forward and backward pass, divided by the memory of the activations that autograd keeps. On a CPU,
the allocator leaves gaps.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """The usual range of a setting of a large model, and the values to set instead of one far outside of it."""

    low: float
    high: float
    instead: str

    def is_far(self, value: float) -> bool:
        """Return whether the value is outside the range. 0 turns a setting off, so it isn't."""
        return bool(value) and not self.low <= value <= self.high


USUAL_RATE: dict[Method, Usual] = {
    "lora": Usual(low=2e-6, high=1e-3, instead="1e-5 to 5e-4"),
    "full": Usual(low=1e-8, high=1e-4, instead="1e-6 to 1e-5"),
}
USUAL_TEMPERATURE = Usual(low=0.3, high=1.5, instead="1")
USUAL_RANK = Usual(low=1, high=256, instead="8 to 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that its memory depends on."""

    layers: int
    hidden: int
    intermediate: int
    """Hidden size of the feed-forward network, of all experts that a token is sent to."""
    query: int
    """Number of values in a token's queries: heads x head size."""
    key: int
    """Number of values in a token's keys, and in its values: key-value heads x head size."""
    positions: int | None
    """Maximum number of tokens in a sequence; None if the config sets no limit."""

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Return the shape in a transformers config."""
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=_intermediate(text),
            query=heads * head_dim,
            key=key_heads * head_dim,
            positions=getattr(text, "max_position_embeddings", None),
        )

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token's keys and values in all layers, for values of `itemsize` bytes."""
        return 2 * self.layers * self.key * itemsize

    def activation_bytes(self, *, method: Method, itemsize: int, checkpointing: bool) -> int:
        """Estimate the bytes per token that autograd keeps between a forward and a backward pass.

        A layer keeps about 4 vectors of the hidden size (the inputs and outputs of its norms), 5 of the queries' size
        (queries, keys and values repeated for all heads, the result, and the output projection's input), and 4 of the
        feed-forward network's size. An adapter keeps the input of each linear layer as float32. With a trained norm,
        more intermediate results are kept.

        Args:
            method: Whether an adapter or the whole model is trained.
            itemsize: Bytes of one value of the type that the model computes in.
            checkpointing: Whether only each layer's input is kept, and the other activations of one layer at a time.
        """
        values = 4 * self.hidden + 5 * self.query + 4 * self.intermediate
        layer = values * (4 if method == "lora" else itemsize + 0.75)
        if checkpointing:
            return int(self.layers * self.hidden * itemsize + layer)
        return int(self.layers * layer)


def _intermediate(text: Any) -> int:
    """Return the width of the feed-forward network, times the experts of a token if there are experts."""
    dense = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    widest = max(dense) if isinstance(dense, list | tuple) else dense
    experts = getattr(text, "num_experts_per_tok", None)
    return int(experts * (getattr(text, "moe_intermediate_size", None) or widest) if experts else widest)


def learning_rate(method: Method, *, tiny: bool) -> float:
    """Return the default learning rate.

    Args:
        method: Whether an adapter or the whole model is trained.
        tiny: Whether the model is one of the tiny ones that come with the library.
    """
    return TINY_RATE if tiny else RATE[method]


def threads(weights: int, device: Device, processors: int) -> int:
    """Return the default number of CPU threads: all processors for a large model on a CPU, otherwise one."""
    return processors if device == "cpu" and weights > LARGE else 1


def context_tokens(shape: ModelShape, itemsize: int, slots: int, device: Device, memory: int) -> int:
    """Return the embedded engine's default context: as many tokens as the model has positions, if their KV has room.

    Args:
        shape: The model's shape.
        itemsize: Bytes of one value of the KV.
        slots: Number of turns that are sampled at once.
        device: Device of the engine.
        memory: Bytes of memory of the machine or the GPU.
    """
    room = max(KV_BYTES, memory // KV_SHARE[device]) // (slots * shape.kv_bytes(itemsize))
    return min(shape.positions or LEAST_CONTEXT, max(LEAST_CONTEXT, room))


def micro_batch_tokens(kept: int, device: Device, memory: int) -> int:
    """Return the default number of tokens in a micro-batch, a power of 2.

    Args:
        kept: Bytes per token that autograd keeps; see `ModelShape.activation_bytes`.
        device: Device of the trainer.
        memory: Bytes of memory of the machine or the GPU.
    """
    room = memory // ACTIVATION_SHARE[device]
    room = min(room, CPU_ACTIVATIONS) if device == "cpu" else room
    fits = int(room / (kept * OVERHEAD[device]))
    return min(MOST_TOKENS, max(LEAST_TOKENS, 1 << max(fits, 1).bit_length() - 1))

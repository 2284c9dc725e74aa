"""A transformers model for the embedded engine: forward passes over KV slots, sampling, and scores."""

import math
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agentgym.causal_lm.decoder import decoder_of
from agentgym.causal_lm.logit_map import find_logit_map
from agentgym.causal_lm.model_defaults import Device, ModelShape, context_tokens, threads
from agentgym.engines.transformers.fast_decoder import dense
from agentgym.engines.transformers.shared_prefix import Prefix, RowGroups
from agentgym.engines.transformers.slot_attention import NAME, register
from agentgym.errors.extras import needs_extra
from agentgym.errors.tracebacks import describe
from agentgym.hub import gpu_number, loading
from agentgym.machine.resources import usable_memory, usable_processors
from agentgym.types.arrays import Floats, Ints

_CHECKED_IDS = 8
"""Number of ids on which the engine, when it opens, compares its logits with the model's own."""
_SCORED_AT_ONCE = 512
"""Number of positions whose logits `score` computes at once."""
_ROUNDING = {torch.float32: 1e-4}
"""Largest mean difference between the engine's logits and the model's own, in standard deviations of the logits, by the
dtype of the model's weights.
"""
_ROUNDING_HALF = 0.1
"""The same for 16-bit weights."""
_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose only state is the keys and values of each id."""


class Part(NamedTuple):
    """The `top_p`, `top_k` and `min_p` of each row. Ids outside of these bounds are never sampled."""

    top_p: Floats
    top_k: Ints
    min_p: Floats


def load_model(name: str | Path, *, dtype: str, device: str) -> Any:
    """Load a causal language model by name or folder onto a device. `TransformersConfig` describes the dtype "auto"."""
    with needs_extra():
        from transformers import AutoModelForCausalLM

    place = device_of(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    with loading(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    return model.to(place)


def device_of(name: str) -> torch.device:
    """Return the torch device with this name; "auto" is a GPU if there is one.

    Under torchrun, "cuda" is the GPU of the process's local rank.

    Raises:
        ValueError: If torch has no such device, or the machine has no such GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: torch has no device {name!r}; use auto, cpu, cuda or cuda:N") from None
    return torch.device("cuda", gpu_number(name, gpus)) if device.type == "cuda" else device


def stop_ids(model: Any) -> set[int]:
    """Return the ids that end a turn according to the model's generation config, or else to its config."""
    stops = _as_set(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    return stops or _as_set(getattr(model.config.get_text_config(), "eos_token_id", None))


def _as_set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


class EngineMemory(NamedTuple):
    """The memory of an engine in bytes: its weights, and its KV cache if all slots are full."""

    weights: int
    kv: int


class Found(NamedTuple):
    """Values of settings whose default depends on the loaded model and the machine."""

    context_tokens: int
    threads: int


def find_defaults(model: Any, slots: int) -> Found:
    """Return the default context and threads of an engine with this many slots."""
    on_gpu = model.device.type == "cuda"
    memory = torch.cuda.get_device_properties(model.device).total_memory if on_gpu else usable_memory()
    device: Device = "cuda" if on_gpu else "cpu"
    weights = sum(weight.numel() for weight in model.parameters())
    context = context_tokens(ModelShape.of(model.config), model.dtype.itemsize, slots, device, memory)
    return Found(context, threads(weights, device, usable_processors()))


def _column_shape(config: Any) -> tuple[int, int, int, int]:
    """Return the shape of one id's KV: layers, 2 (keys and values), heads, and values per head."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_hidden_layers, 2, heads, head_dim


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, they take memory only when they are first written.

    The KV must be zeros, because a masked column still gets weight 0, and 0 times a NaN in uninitialized memory is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # A first write takes a whole page, and a huge one holds whole contexts.
        with suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


class SlotCache:
    """Keys and values of every slot. Each row of a batch writes at its own columns. It replaces transformers' Cache.

    The data is one tensor `[layers, 2, slots, kv_heads, context + 1, head_dim]`. The last column is never read. Idle
    slots that lie between the batch's slots are computed with the batch, and write to that column.
    """

    is_compileable = False

    def __init__(self, config: Any, slots: int, context: int, *, dtype: torch.dtype, device: torch.device) -> None:
        layers, two, heads, head_dim = _column_shape(config)
        shape = (layers, two, slots, heads, context + 1, head_dim)
        self._all = _zeros(shape, dtype, device)
        self._layers = [(layer[0], layer[1]) for layer in self._all]
        self._rows: slice | torch.Tensor = slice(0)
        self._columns = self._positions = self._row_index = torch.empty(0, dtype=torch.long, device=device)
        self._reach = 0

    def aim(
        self,
        rows: slice | torch.Tensor,
        row_index: torch.Tensor,
        columns: torch.Tensor,
        positions: torch.Tensor,
        reach: int,
    ) -> None:
        """Tell the cache which slots the next forward pass computes.

        The pass will compute ids at `positions` [rows, width], write at `columns` [rows, width] and read the columns
        below `reach`.
        """
        self._rows, self._row_index, self._columns, self._reach = rows, row_index[:, None], columns, reach
        self._positions = positions

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new keys and values, and return all keys and values that the batch may attend to."""
        all_keys, all_values = self._layers[layer_idx]
        all_keys[self._row_index, :, self._columns] = keys.transpose(1, 2)
        all_values[self._row_index, :, self._columns] = values.transpose(1, 2)
        return all_keys[self._rows, :, : self._reach], all_values[self._rows, :, : self._reach]

    @property
    def nbytes(self) -> int:
        """The bytes of all slots' keys and values."""
        return self._all.nbytes

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because every call passes its positions explicitly. transformers requires this method."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the positions of the next pass's ids, [rows, width]. transformers passes them to `slot_attention`."""
        return self._positions

    def get_mask_sizes(self, width: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of columns that the next pass reads, and the first of them."""
        return self._reach, 0

    def copy(self, source: int, target: int, columns: slice) -> None:
        """Copy these columns from the source slot to the target slot."""
        self._all[:, :, target, :, columns] = self._all[:, :, source, :, columns]


class InferenceModel:
    """A causal language model over KV slots, whose log-probabilities equal those of a plain forward pass.

    It accepts unmodified transformers models whose layers attend to the whole context, to a sliding window or to
    chunks (Llama, Qwen2, Qwen3, Mistral, Gemma and similar models). It takes over the model, and sets it to eval mode
    without gradients.

    Raises:
        ValueError: If the model isn't of this kind, or has fewer positions than `context`.
    """

    def __init__(self, model: Any, *, slots: int, context: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.dtype = str(model.dtype).removeprefix("torch.")
        """The dtype of the model's weights, such as float32."""
        config = model.config.get_text_config()
        _refuse(config, context)
        if not (model.is_backend_compatible() or model._can_set_attn_implementation()):
            raise ValueError(f"{config.model_type}: its attention can't be replaced; use another engine")
        register()
        model.set_attn_implementation(NAME)
        self.model = model.eval().requires_grad_(False)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.context = context
        self._decoder = decoder_of(model)
        self._head = model.get_output_embeddings()
        self._device: torch.device = model.device
        self._cache = SlotCache(config, slots, context, dtype=model.dtype, device=model.device)
        self._positions = torch.arange(context, device=model.device)
        self._logit_map = find_logit_map(model, self._decoder, self._checked_ids())
        self._dense = dense(model, context)
        self._check()

    def _check(self) -> None:
        """Compare the engine's logits with the model's own, without the fast decoder if that one's differ.

        Raises:
            ValueError: If they differ, or if the engine can't compute the model.
        """
        name, allowed = self.model.config.model_type, _ROUNDING.get(self.model.dtype, _ROUNDING_HALF)
        try:
            if self._dense is not None and not self._mismatch() <= allowed:
                self._dense = None
            off = self._mismatch()
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # Models raise all kinds of errors for keys and values of another shape.
            said = " ".join(describe(error).split())
            raise ValueError(
                f"{name}: the embedded engine can't compute it ({said:.200}); use another engine"
            ) from error
        if not off <= allowed:
            raise ValueError(_mismatch_error(name, self.dtype, off, allowed))

    @property
    def memory(self) -> EngineMemory:
        """The bytes of the weights and of the KV cache."""
        weights = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        return EngineMemory(weights, self._cache.nbytes)

    def reread(self) -> None:
        """Use the model's current weights from now on. Call this after they changed, because some may be copies."""
        if self._dense is not None:
            self._dense = dense(self.model, self.context)

    @torch.inference_mode()
    def forward(self, rows: Ints, ids: Ints, start: Ints, width: Ints, groups: RowGroups | None = None) -> torch.Tensor:
        """Compute the next ids of each row, and return the hidden state of each row's last id, [rows, hidden].

        Row i computes `width[i]` ids from column `start[i]` on::

            rows 2  ids a b c  width 3
                 5      d e .        2      . is padding: its KV is past the row's end, where the next ids' KV will be

        `rows` are slots in ascending order. `ids` is [rows, max width]. `groups` lists rows with a common prefix, and
        may only be given if each row has one id to compute.
        """
        column = np.minimum(start[:, None] + np.arange(ids.shape[1]), self.context)
        # Padding gets the position of the row's last id, so that it attends to some key in every kind of layer. Without
        # any, its keys and values could be NaN, which a mask doesn't hide from the next ids.
        position = np.minimum(column, (start + width - 1)[:, None])
        low, high = int(rows[0]), int(rows[-1]) + 1
        # If the rows are close together, the whole range of slots from the first to the last is read in place,
        # including idle slots. A gather would copy every row's KV at every layer.
        if high - low <= (2 * len(rows) if ids.shape[1] == 1 else len(rows)):
            at = rows - low
            ids, position = _spread(ids, at, high - low, 0), _spread(position, at, high - low, 0)
            column = _spread(column, at, high - low, self.context)
            where: slice | torch.Tensor = slice(low, high)
            index = torch.arange(low, high, device=self._device)
        else:
            at = np.arange(len(rows))
            where = index = self._tensor(rows)
        reach = int((start + width).max())
        prefix = None
        if groups is not None and self._dense is not None:
            prefix = Prefix(groups, at, len(ids), self._device)
        hidden = self._hidden(where, index, ids, position, column, reach, prefix)
        return hidden[self._tensor(at), self._tensor(width - 1)]

    def _hidden(
        self,
        where: slice | torch.Tensor,
        index: torch.Tensor,
        ids: Ints,
        position: Ints,
        column: Ints,
        reach: int,
        prefix: Prefix | None,
    ) -> torch.Tensor:
        positions = self._tensor(position)
        self._cache.aim(where, index, self._tensor(column), positions, reach)
        if self._dense is not None:
            mask = self._positions[:reach] <= positions[:, None, :, None]
            return self._dense(self._tensor(ids), mask, positions, self._cache.update, prefix)
        out = self._decoder(
            input_ids=self._tensor(ids),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    @torch.inference_mode()
    def draw(
        self, hidden: torch.Tensor, temperature: Floats, uniform: Floats, part: Part | None = None
    ) -> tuple[Ints, Floats]:
        """Sample one id per row, and return the ids and their log-probabilities.

        At temperature 0, the likeliest id is chosen. Row i's sample depends only on its distribution and on the random
        number `uniform[i]`, by inversion of the cumulative distribution. It can't depend on other rows. With `part`,
        only a part of the distribution is sampled from, but the log-probability is still that under the whole
        distribution.
        """
        greedy = temperature == 0
        logprobs = self._logprobs(hidden, np.where(greedy, np.float32(1), temperature))
        probs = logprobs.exp()
        if part is not None:
            probs = probs * self._kept(probs, part)
        cumulative = probs.cumsum(-1)
        # The random number is scaled by the row's total, which isn't exactly 1 after rounding. So an id with
        # probability 0 is never drawn.
        level = self._tensor(uniform)[:, None] * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, level, right=True).clamp_(max=cumulative.shape[-1] - 1)
        if greedy.any():
            best = logprobs.argmax(-1, keepdim=True)
            ids = torch.where(self._tensor(greedy)[:, None], best, ids)
        return ids[:, 0].cpu().numpy(), logprobs.gather(-1, ids)[:, 0].cpu().numpy()

    def _kept(self, probs: torch.Tensor, part: Part) -> torch.Tensor:
        """Return whether each id is inside its row's bounds, [rows, vocabulary].

        As in SGLang, each bound applies to the whole distribution, not to what the other bounds leave of it.
        """
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered
        rank = torch.arange(probs.shape[-1], device=self._device)
        top_p, top_k, min_p = (self._tensor(bound)[:, None] for bound in part)
        kept = (likelier <= top_p) & (rank < top_k) & (ordered >= min_p * ordered[:, :1])
        kept[:, 0] = True
        return torch.zeros_like(kept).scatter_(-1, ids, kept)

    @torch.inference_mode()
    def score(self, ids: Ints, temperature: float) -> Floats:
        """Return the log-probability of each id except the first, from a plain forward pass without cached KV."""
        tokens = self._tensor(ids)[None]
        hidden = self._decoder(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state[0]
        scale = np.full(1, temperature or 1.0, np.float32)
        targets = tokens[0, 1:, None]
        # The logits are computed in chunks, because with a large vocabulary, those of a whole context would take more
        # memory than the model's activations.
        pieces = [slice(i, i + _SCORED_AT_ONCE) for i in range(0, len(targets), _SCORED_AT_ONCE)]
        scores = [self._logprobs(hidden[i], scale).gather(-1, targets[i])[:, 0] for i in pieces]
        return torch.cat(scores).cpu().numpy()

    def copy(self, source: int, target: int, columns: slice) -> None:
        """Copy these columns' KV from the source slot to the target slot."""
        with torch.inference_mode():
            self._cache.copy(source, target, columns)

    def _logprobs(self, hidden: torch.Tensor, temperature: Floats) -> torch.Tensor:
        logits = self._logit_map(self._head(hidden).float())
        return torch.log_softmax(logits / self._tensor(temperature)[:, None], dim=-1)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _checked_ids(self) -> Ints:
        return np.arange(min(_CHECKED_IDS, self.context), dtype=np.int64) % self.vocabulary

    @torch.inference_mode()
    def _mismatch(self) -> float:
        """Return how far the engine's logits are from the model's own: the mean difference, in standard deviations.

        The engine computes a few ids in two forward passes. With 16-bit weights, rounding depends on the number of ids
        in a pass. The model therefore computes the ids both in one pass and in two, and the smaller difference
        counts.
        """
        ids = self._checked_ids()[None]
        half = ids.shape[1] // 2
        row, zero = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for part, start in ((ids[:, :half], 0), (ids[:, half:], half)):
            if part.size:
                hidden = self.forward(row, part, zero + start, zero + part.shape[1])
        ours, whole = self._logit_map(self._head(hidden).float()), self._tensor(ids)
        theirs = [self.model(input_ids=whole, use_cache=False)]
        if half and self.model.dtype != torch.float32:
            kept = self.model(input_ids=whole[:, :half], use_cache=True).past_key_values
            theirs.append(self.model(input_ids=whole[:, half:], past_key_values=kept, use_cache=True))
        return min(_apart(ours, out.logits[:, -1].float()) for out in theirs)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the mean difference of two tensors, in standard deviations of the second one."""
    return float((ours - theirs).abs().mean() / theirs.std().clamp(min=1e-12))


def _mismatch_error(name: str, dtype: str, off: float, allowed: float) -> str:
    instead = "another engine" if dtype == "float32" else 'dtype="float32" (--engine.dtype float32) or another engine'
    return (
        f"{name}: the embedded engine's logits in {dtype} are {off:.2g} standard deviations from the "
        f"model's own, and rounding explains at most {allowed:g}; use {instead}"
    )


def _spread(array: Ints, at: Ints, rows: int, fill: int) -> Ints:
    """Put the rows of an array at the indices `at` of a taller array, whose other rows contain `fill`.

    If there are no other rows, the array itself is returned.
    """
    if rows == len(array):
        return array
    taller = np.full((rows, array.shape[1]), fill, array.dtype)
    taller[at] = array
    return taller


def _refuse(config: Any, context: int) -> None:
    """Raise ValueError if the engine's log-probabilities would differ from those of a plain forward pass."""
    name = config.model_type
    if not hasattr(config, "num_attention_heads"):
        raise ValueError(f"{name}: has no attention; use another engine")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if odd:
        raise ValueError(f"{name}: has layers of {', '.join(odd)}; the embedded engine only supports attention")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    for kind in {"dynamic", "longrope"} & kinds:
        raise ValueError(f"{name}: {kind} rope makes scores depend on the batch's longest row; use another engine")
    limit = getattr(config, "max_position_embeddings", context)
    if context > limit:
        raise ValueError(f"context_tokens: expected at most {limit} for {name}, got {context}")

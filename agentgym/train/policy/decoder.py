"""Wrappers that make a decoder, or parts of it, compute each sequence as if it were alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agentgym.train.policy.attention import NAME
from agentgym.train.policy.row import Row, RowMask, computing, current_row, current_sequences, padded_sequences

Forward = Callable[..., Any]
LENGTH_ROPE = "longrope"
"""Kind of rotary positions whose frequencies depend on the length of the sequence."""


def wrap_decoder(decoder: Any) -> None:
    """Patch the decoder in place, so that its `forward` accepts a `Row` as the keyword argument named by `NAME`.

    Rotary frequencies that depend on a sequence's length are then computed separately for each sample.
    """
    if isinstance(decoder.forward, partial):
        return
    decoder.forward = partial(_in_its_row, decoder, decoder.forward)
    for module in decoder.modules():
        if LENGTH_ROPE in rope_kinds(module):
            module.forward = partial(_rotary_by_sample, module.forward)


def rope_kinds(module: Any) -> set[Any]:
    """Return the kinds of rotary positions (rope types) that a module computes; empty if it computes none."""
    kinds = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds} - {None}


def _in_its_row(decoder: Any, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    row: Row | None = kwargs.pop(NAME, None)
    mask, sequences = kwargs.get("attention_mask"), None
    if row is not None:
        # If a mask is passed, transformers treats the row as one sample, and doesn't try to find samples in its
        # positions.
        kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"], dtype=torch.bool)
    elif isinstance(mask, Tensor) and mask.ndim == 2 and hasattr(decoder, UNPACKED):
        sequences = padded_sequences(mask)
    with computing(row, sequences):
        return forward(*args, **kwargs)


UNPACKED = "agentgym_by_sequence"
"""Attribute of a decoder that lists the names of its parts that are computed sequence by sequence."""


def compute_by_sequence(decoder: Any, names: tuple[str, ...]) -> None:
    """Make the named parts of the decoder compute each sequence of a block separately, from its first token on."""
    done = getattr(decoder, UNPACKED, ())
    for name in names:
        if name not in done:
            module = decoder.get_submodule(name)
            module.forward = partial(_by_sequence, module.forward)
    setattr(decoder, UNPACKED, (*done, *(name for name in names if name not in done)))


def whole_by_row(decoder: Any, names: tuple[str, ...]) -> None:
    """Undo `compute_by_sequence`."""
    done = getattr(decoder, UNPACKED, ())
    for name in (name for name in names if name in done):
        decoder.get_submodule(name).forward = decoder.get_submodule(name).forward.args[0]
    setattr(decoder, UNPACKED, tuple(name for name in done if name not in names))


def _by_sequence(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    sequences = current_sequences()
    if sequences is None:
        return forward(*args, **kwargs)
    # The padding follows each sequence. A causal layer's earlier outputs don't depend on it, so no mask is needed.
    args, kwargs = _each(lambda x: None if isinstance(x, RowMask) else sequences.spread(x), (args, kwargs))
    return _each(sequences.collect, forward(*args, **kwargs))


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to every item nested in the value's tuples, lists and dicts, and return the result."""
    if isinstance(value, tuple | list):
        return type(value)([_each(change, item) for item in value])
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    return change(value)


def _rotary_by_sample(forward: Forward, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute the rotary positions of each sample as if it were alone, with the module's own `forward`.

    Raises:
        ValueError: If the samples share tokens in a tree.
    """
    row = current_row()
    if row is not None and row.runs.keys is not None:
        raise ValueError(
            "layout: the model's rotary positions depend on the sample's length, but in a tree samples of different "
            "lengths share tokens; use layout packed"
        )
    at = x[:1, :1]
    rows = []
    for positions in position_ids:
        starts = (positions == 0).nonzero()[1:, 0].tolist() if len(position_ids) == 1 else []
        parts = torch.tensor_split(positions, starts)
        rows.append(_joined([forward(at, part[None], *args, **kwargs) for part in parts], 1))
    return _joined(rows, 0)


def _joined(parts: list[Any], axis: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, axis)
    return tuple(torch.cat(same, axis) for same in zip(*parts, strict=True))


def mixing_parts(decoder: Any, run: Callable[[Row], Any], row: Row) -> tuple[str, ...]:
    """Return the names of layer parts whose tokens depend on earlier tokens by means other than attention.

    Such a part needs `compute_by_sequence`. `run` computes the row, which must contain one sample. Each part that
    doesn't attend is then computed again with a different first token. If the output of a later token changes, the
    part mixes tokens.
    """
    attending: set[nn.Module] = set()
    row.attending = attending
    calls: dict[str, tuple[nn.Module, Any, Any]] = {}
    hooks = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, (module, args, kwargs))

        return hook

    for prefix, layers in decoder.named_modules():
        if isinstance(layers, nn.ModuleList):
            for number, layer in enumerate(layers):
                for name, part in layer.named_children():
                    full = f"{prefix}.{number}.{name}"
                    hooks.append(part.register_forward_pre_hook(keep(full), with_kwargs=True))
    try:
        run(row)
    finally:
        for hook in hooks:
            hook.remove()
    found: list[str] = []
    for name, (part, args, kwargs) in calls.items():
        inside = any(name.startswith(f"{other}.") for other in found)
        if not inside and attending.isdisjoint(part.modules()) and _mixes(part, args, kwargs, len(row.end_T)):
            found.append(name)
    return tuple(found)


@torch.no_grad()
def _mixes(part: nn.Module, args: Any, kwargs: Any, tokens: int) -> bool:
    """Return whether the part's outputs at later tokens change if its input at the first token does."""

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[:2] != (1, tokens):
            return value
        changed = value.clone()
        changed[:, 0] += value.std() + 1
        return changed

    try:
        before = part(*args, **kwargs)
        after = part(*_each(other, args), **kwargs) if args else part(**_each(other, kwargs))
    except Exception:  # The part can't run alone. The comparison of layouts then decides.
        return False
    pair = [x[0] if isinstance(x, tuple) else x for x in (before, after)]
    if not all(isinstance(x, Tensor) and x.shape[:2] == (1, tokens) for x in pair):
        return False
    return not torch.allclose(pair[0][:, 1:].float(), pair[1][:, 1:].float(), rtol=1e-5, atol=1e-7)

"""Checks that run when a model is opened: whether its hidden states in a layout equal those of each sequence alone."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentgym.causal_lm.decoder import decoder_of
from agentgym.causal_lm.logit_map import LogitMap, find_logit_map
from agentgym.errors.tracebacks import describe
from agentgym.train.batching.batch import scored_sample
from agentgym.train.batching.layouts import Inputs, Layout, lay_out
from agentgym.train.policy.attention import NAME, register
from agentgym.train.policy.decoder import compute_by_sequence, mixing_parts, whole_by_row, wrap_decoder
from agentgym.train.policy.row import Row
from agentgym.types.arrays import Ints
from agentgym.types.sample import Sample

LENGTHS = (11, 4, 9, 2)
"""Lengths in tokens of the sequences that the checks compute. The first three share their first three tokens."""
LARGE = 50_000_000
"""Number of weights above which the comparison uses all of the machine's cores instead of one thread."""


def tolerance(dtype: torch.dtype) -> float:
    """Return how much rounding may change hidden states: the mean difference, in standard deviations."""
    return 1e-4 if dtype == torch.float32 else 0.1


@contextmanager
def _cores(model: Any) -> Iterator[None]:
    """Use all cores inside the block for a large model, but only one thread for a small one.

    One thread is as fast for a small model, and leaves the other cores free.
    """
    before = torch.get_num_threads()
    large = sum(weight.numel() for weight in model.parameters()) > LARGE
    torch.set_num_threads(len(os.sched_getaffinity(0)) if large else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_padded(model: Any) -> tuple[str, ...]:
    """Check that left-padded rows give the same hidden states as each sequence alone.

    If they differ at first, the parts of the decoder that mix tokens by means other than attention are changed to
    compute each sequence separately, and the states are compared again.

    Returns:
        The names of the changed parts; empty for most models.

    Raises:
        ValueError: If the states still differ. The message names the model.
    """
    with _cores(model):
        decoder, samples = _decoder(model), _samples(model)
        alone = _alone(decoder, samples)
        failure = _difference(model, decoder, samples, alone, "padded")
        if failure is None:
            return ()
        parts = _mixing(model)
        compute_by_sequence(decoder, parts)
        if parts and _difference(model, decoder, samples, alone, "padded") is None:
            return parts
        whole_by_row(decoder, parts)
        raise ValueError(f"layout: {_name(model)} gives wrong results in padded rows ({failure}); train another model")


def attend_in_rows(
    model: Any, layouts: Sequence[Layout] = ("packed", "tree"), parts: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Make the model compute the samples of a row independently of each other, without changing its code.

    Each layout's results are compared with those of each sequence alone.

    Args:
        model: A transformers model, with or without an adapter.
        layouts: The layouts to check.
        parts: The result of an earlier call, which is applied without a check, so the model needs no weights. None
            runs the check and finds the parts.

    Returns:
        The names of the parts that are computed sequence by sequence, such as those with a recurrent state.

    Raises:
        ValueError: If the model's results would be wrong in a layout.
    """
    decoder = _decoder(model)
    if parts is not None:
        _attend(model)
        compute_by_sequence(decoder, parts)
        return parts
    with _cores(model):
        before, samples = model.config._attn_implementation, _samples(model)
        alone = _alone(decoder, samples)
        parts = _mixing(model)
        _attend(model)
        compute_by_sequence(decoder, parts)
        for layout in layouts:
            failure = _difference(model, decoder, samples, alone, layout)
            if failure is not None:
                model.set_attn_implementation(before)
                whole_by_row(decoder, parts)
                raise ValueError(
                    f"layout: {_name(model)} gives wrong results in layout {layout} ({failure}); "
                    f"{_instead(model, failure)}"
                )
    return parts


def _instead(model: Any, failure: str) -> str:
    """Return what to do about wrong results in a layout, as the end of an error message."""
    if "use layout packed" in failure:
        return "use layout packed"
    try:
        check_padded(model)
    except ValueError:
        return "train another model"
    return "use layout padded"


def _name(model: Any) -> str:
    name: str = model.config.model_type
    return name


def _attend(model: Any) -> None:
    register()
    # Some model families use the attention interface without declaring it.
    if model.is_backend_compatible() or model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


def _decoder(model: Any) -> Any:
    decoder = decoder_of(model)
    wrap_decoder(decoder)
    return decoder


def _samples(model: Any) -> list[Sample]:
    """Return sequences of different lengths, some of which share a prefix."""
    rng = np.random.default_rng(0)
    plain = _ids(model)
    drawn = [rng.choice(plain, length) for length in LENGTHS]
    for sequence in drawn[1:-1]:
        sequence[:3] = drawn[0][:3]
    return [replace(scored_sample(ids), rollout_id=str(number)) for number, ids in enumerate(drawn)]


def _ids(model: Any) -> Ints:
    """Return ids that the config doesn't define as special tokens."""
    special = set()
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special |= set(value if isinstance(value, list | tuple) else [value])
    count = int(model.get_input_embeddings().weight.shape[0])
    plain: Ints = np.array([i for i in range(min(count, 1000)) if i not in special], np.int64)
    return plain


def _on(model: Any, inputs: Inputs) -> Inputs:
    return inputs.on(model.get_input_embeddings().weight.device)


@torch.no_grad()
def _alone(decoder: Any, samples: Sequence[Sample]) -> Tensor:
    """Return the hidden states of all sequences, each computed in a separate forward pass."""
    device = next(decoder.parameters()).device
    states = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))[None].to(device)
        states.append(decoder(input_ids=ids, use_cache=False).last_hidden_state[0, :-1])
    return torch.cat(states).float()


@torch.no_grad()
def _difference(model: Any, decoder: Any, samples: Sequence[Sample], alone: Tensor, layout: Layout) -> str | None:
    """Return a description of what is wrong in this layout, or None if its hidden states match those in `alone`."""
    inputs = _on(model, lay_out(samples, layout=layout, pad_id=0))
    try:
        hidden_BTH = decoder(**inputs.arguments(), use_cache=False).last_hidden_state
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # Models raise all kinds of errors for an unsuitable layout.
        return " ".join(describe(error).split())
    states = hidden_BTH.flatten(0, 1)[inputs.source_N][inputs.index_M].float()
    apart = float((states - alone).abs().mean() / alone.std().clamp(min=1e-12))
    if apart <= tolerance(model.dtype):  # False for NaN too.
        return None
    return f"its hidden states are {apart:.2g} standard deviations from those of each sequence alone"


def _mixing(model: Any) -> tuple[str, ...]:
    """Return the layer parts that mix tokens by means other than attention.

    The result is empty if there are none, or if the model fails on a packed row.
    """
    decoder, before = _decoder(model), model.config._attn_implementation
    inputs = _on(model, lay_out(_samples(model)[:1], layout="packed", pad_id=0))
    arguments = inputs.arguments()
    row: Row = arguments.pop(NAME)
    _attend(model)
    try:
        with torch.no_grad():
            return mixing_parts(decoder, lambda row: decoder(**arguments, **{NAME: row}, use_cache=False), row)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # the comparison of layouts reports the error in its own forward pass
        return ()
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def logit_map_of(model: Any) -> LogitMap:
    """Find out how the model changes its output layer's logits.

    Raises:
        ValueError: If the change is more than a factor and a soft cap.
    """
    with _cores(model):
        sample = _samples(model)[0]
        return find_logit_map(model, _decoder(model), np.concatenate([sample.prompt_ids, sample.response_ids]))

"""The map from an output layer's logits to the logits of the softmax."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentgym.types.arrays import Ints

PEAK = 50.0
"""Size to which the largest logit is scaled when the model's logit map is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitMap:
    """How a model changes its output layer's logits: by a factor, then by a soft cap (arXiv 2408.00118)."""

    scale: float = 1.0
    """Factor of the logits, such as Cohere's logit_scale or 1 / Granite's logits_scaling."""
    cap: float | None = None
    """Bound c of the logits, which become c tanh(logit / c); None sets no bound."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given those of its output layer."""
        scaled = logits if self.scale == 1 else logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


PLAIN = LogitMap()


PLAIN = LogitMap()


@torch.no_grad()
def find_logit_map(model: Any, decoder: Any, ids: Ints) -> LogitMap:
    """Find out how a transformers model changes its output layer's logits.

    The hidden states of one sequence are scaled up, so that a cap has a visible effect. Only a factor and a cap that
    are in the model's config are tried.

    Args:
        model: The model.
        decoder: The part of the model that turns ids into hidden states.
        ids: The ids of the sequence.

    Raises:
        ValueError: If the change is more than a factor and a soft cap.
    """
    head, name = model.get_output_embeddings(), model.config.model_type
    input_ids = torch.from_numpy(ids)[None].to(model.get_input_embeddings().weight.device)
    plain = head(decoder(input_ids=input_ids, use_cache=False).last_hidden_state).float()
    with _stretched(decoder, PEAK / max(float(plain.abs().max()), 1e-12)) as kept:
        theirs = model(input_ids=input_ids, use_cache=False).logits.float()
    ours = head(kept[-1]).float() if kept else plain
    if theirs.shape != ours.shape:
        raise ValueError(f"model: {name} has logits of another shape than its output layer's; use another model")
    errors = {candidate: float((candidate(ours) - theirs).abs().max()) for candidate in _candidates(model)}
    best = min(errors, key=errors.__getitem__)
    allowed = (1e-3 if model.dtype == torch.float32 else 5e-2) * float(theirs.abs().max())
    if not errors[best] <= allowed:
        raise ValueError(
            f"model: {name} changes its logits after the output layer by more than a factor or soft cap from its "
            f"config (they differ by {errors[best]:.2g}), which is not supported; use another model"
        )
    return best


def _candidates(model: Any) -> list[LogitMap]:
    """Return the maps that are possible with the numbers in the config.

    The map that changes nothing comes first, so it is chosen if several maps fit equally well.
    """
    values: dict[str, float] = {}
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                values[name] = float(value)
    scales = list(dict.fromkeys([1.0, *(x for v in values.values() for x in (v, 1 / v))]))
    caps = [value for name, value in values.items() if "cap" in name.lower()]
    return [LogitMap(scale=scale, cap=cap) for cap in (None, *dict.fromkeys(caps)) for scale in scales]


@contextmanager
def _stretched(decoder: Any, factor: float) -> Iterator[list[Tensor]]:
    """Multiply the decoder's hidden states by a factor inside the block.

    Yields:
        A list to which each call of the decoder appends its scaled states.
    """
    forward, kept = decoder.forward, []

    def stretched(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        states = out[0] * factor
        kept.append(states)
        if isinstance(out, tuple):
            return (states, *out[1:])
        out.last_hidden_state = states
        return out

    decoder.forward = stretched
    try:
        yield kept
    finally:
        decoder.forward = forward

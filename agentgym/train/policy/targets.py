"""Finds the weights that get an adapter, and how much of the model they cover."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from agentgym.causal_lm.decoder import decoder_of

ALL_LINEAR = "all-linear"
"""The target that means every linear layer in the decoder's layers with three exceptions: layers that route tokens to
experts, projections whose weight a state-space kernel reads directly, and layers that PEFT mistakes for expert weights.
"""
EXPERTS = "experts"
"""The target that means experts whose weights are stored as one tensor, with a matrix for each expert."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which a model's config may store the number of experts."""
EXPERT_PARTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of the linear layers of experts and of their router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The full names of the weights that get an adapter."""

    modules: tuple[str, ...]
    """Names of linear layers."""
    parameters: tuple[str, ...] = ()
    """Names of three-dimensional weights with a matrix for each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of the decoder is trained, by an adapter or directly."""

    share: float
    """Fraction of the weights in the decoder's layers that are trained. Vectors and embeddings don't count."""
    adapted: tuple[str, ...]
    """Short names of the weights that are trained: the last two parts of each name, without duplicates."""
    bare: tuple[str, ...]
    """Short names of the weights that aren't trained: the last two parts of each name, without duplicates."""


def find_targets(model: Any, targets: tuple[str, ...]) -> Targets:
    """Return the weights that get an adapter, given the names in the config's `lora_targets`.

    A layer that ALL_LINEAR leaves out, such as a router of experts, is included only if it is named.

    Raises:
        ValueError: If a name matches nothing in the model, or matches a layer that can't have an adapter.
    """
    linear, stacked = _linear(model), _stacked(model)
    names = {name.rpartition(".")[2] for name in linear}
    asked = set(targets) - {ALL_LINEAR, EXPERTS}
    left_out = {name for name in linear if _routes(model, name, linear[name]) or _used_as_tensor(model, name)}
    everything = [name for name in linear if name not in left_out] if ALL_LINEAR in targets else []
    known = {name.rpartition(".")[2] for name in left_out} if everything else names
    for name in sorted(asked & _ends(model).keys() - names):
        raise ValueError(f"lora_targets: {name} is {_ends(model)[name]}, which can't have an adapter; leave it out")
    if asked - known or not targets:
        choices = (
            f"choose from {', '.join(sorted(known))}, or use only {ALL_LINEAR}" if known else f"use only {ALL_LINEAR}"
        )
        raise ValueError(
            f"lora_targets: {', '.join(sorted(asked - known)) or 'an empty list'} matches no linear layer of this model"
            f"{f' that {ALL_LINEAR} leaves out' if everything else ''}; {choices}"
        )
    if EXPERTS in targets and not stacked:
        raise ValueError(
            f"lora_targets: {EXPERTS} matches nothing in this model, which stores no experts as one tensor"
        )
    chosen = [name for name in linear if name in everything or name.rpartition(".")[2] in asked]
    taken = _taken_for_experts(model, chosen)
    if taken and asked & {name.rpartition(".")[2] for name in taken}:
        raise ValueError(
            f"lora_targets: PEFT mistakes {min(taken)} for an expert weight; leave it out, or use {EXPERTS}"
        )
    chosen = [name for name in chosen if name not in taken]
    if not chosen and EXPERTS not in targets:
        raise ValueError(f"lora_targets: {', '.join(targets)} matches no layer of this model that can have an adapter")
    return Targets(modules=tuple(chosen), parameters=tuple(stacked) if EXPERTS in targets else ())


def coverage(model: Any) -> Coverage:
    """Return how much of a model's decoder is trained."""
    decoder = decoder_of(model)
    outside = {
        id(weight) for part in decoder.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()
    }
    head = model.get_output_embeddings()
    outside |= {id(weight) for weight in head.parameters()}
    found: dict[str, int] = {}
    adapted: set[str] = set()
    for name, weight in decoder.named_parameters():
        if ".lora_" in name:
            place = name.partition(".lora_")[0]
            adapted.add(place)
        elif weight.ndim > 1 and id(weight) not in outside and "lora_" not in name:
            found[name] = weight.numel()
    trained = {name for name, weight in decoder.named_parameters() if weight.requires_grad}
    changed = {name for name in found if name in trained or _has_adapter(name, adapted)}
    total = sum(found.values())
    return Coverage(
        share=sum(found[name] for name in changed) / total if total else 0.0,
        adapted=_short(changed),
        bare=_short(found.keys() - changed),
    )


def _has_adapter(name: str, adapted: set[str]) -> bool:
    """Return whether an adapter changes a weight, given its name inside PEFT's layers."""
    place, _, last = name.rpartition(".")
    layers = place.split(".base_layer")
    if last not in ("weight", "bias"):  # experts: PEFT wraps the module once for each of its weights
        return any(other == layers[0] or other.startswith(f"{layers[0]}.base_layer") for other in adapted)
    return layers[0] in adapted


def _short(names: Any) -> tuple[str, ...]:
    parts = {name.replace(".base_layer", "").removesuffix(".weight") for name in names}
    return tuple(sorted({".".join(name.split(".")[-2:]) for name in parts}))


def _prefix(model: Any) -> str:
    decoder = decoder_of(model)
    name: str = next(name for name, part in model.named_modules() if part is decoder)
    return name


def _linear(model: Any) -> dict[str, nn.Module]:
    """Return the decoder's linear layers by their names in the model, without the output layer."""
    from transformers.pytorch_utils import Conv1D

    prefix, head = _prefix(model), model.get_output_embeddings()
    return {
        ".".join(filter(None, (prefix, name))): part
        for name, part in decoder_of(model).named_modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not head
    }


def _ends(model: Any) -> dict[str, str]:
    """Return a description of the output layer and of each embedding, for messages, by the last part of its name."""
    head = model.get_output_embeddings()
    found = {n: "an embedding" for n, part in model.named_modules() if isinstance(part, nn.Embedding)}
    found |= {n: "the output layer" for n, part in model.named_modules() if part is head}
    return {name.rpartition(".")[2]: said for name, said in found.items()}


def _stacked(model: Any) -> list[str]:
    """Return the names of three-dimensional weights with a matrix for each expert."""
    prefix = _prefix(model)
    return [
        ".".join(filter(None, (prefix, name)))
        for name, weight in decoder_of(model).named_parameters()
        if weight.ndim == 3 and EXPERTS in name.split(".")
    ]


def _routes(model: Any, name: str, layer: Any) -> bool:
    """Return whether a linear layer is a router, which scores each expert, or a gate on the output of experts."""
    config = model.config.get_text_config()
    counts = {getattr(config, setting, None) for setting in EXPERT_COUNTS} | {1}
    parents = name.split(".")[:-1]
    around = [model.get_submodule(".".join(parents[:stop])) for stop in (len(parents), len(parents) - 1)]
    beside = any(EXPERTS in child for part in around for child, _ in part.named_children())
    return beside and EXPERTS not in parents and getattr(layer, "out_features", None) in counts


def _used_as_tensor(model: Any, name: str) -> bool:
    """Return whether a state-space layer passes the named layer's weight to its kernel, which bypasses an adapter."""
    parent, _, last = name.rpartition(".")
    return last in ("out_proj", "dt_proj") and all(
        hasattr(model.get_submodule(parent), part) for part in ("A_log", "D")
    )


def _taken_for_experts(model: Any, names: list[str]) -> set[str]:
    """Return the names that PEFT mistakes for expert weights.

    PEFT does so in model families whose experts were once linear layers.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    wanted = LoraConfig(target_modules=[*names])
    try:
        convert_peft_config_for_transformers(wanted, model, None)
    except ValueError:  # PEFT raises this if only some of the names of one expert weight are given
        return {name for name in names if name.rpartition(".")[2] in EXPERT_PARTS}
    return set(names) - set(wanted.target_modules or ())

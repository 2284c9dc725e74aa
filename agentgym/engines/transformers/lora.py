"""Loads adapters or other weights into a model, and can restore the original weights exactly.

An adapter is merged into float32 weights. If the model's precision is lower, the adapter stays separate.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from agentgym.types.weights import Adapter, ModelWeights

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>A|B|magnitude_vector)(?:\.default)?(?:\.weight)?")
_REFUSED = ("rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "modules_to_save")


class _Delta(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    lengths: torch.Tensor | None
    """The trained lengths to which DoRA rescales the rows of the merged weight; None for an adapter without DoRA."""

    def on(self, device: torch.device) -> "_Delta":
        """Return a float32 copy of the tensors on the given device."""
        a, b = self.a.to(device, torch.float32), self.b.to(device, torch.float32)
        return _Delta(a, b, None if self.lengths is None else self.lengths.to(device, torch.float32))


class Merger:
    """Loads adapters and weights into a model.

    The original weights are saved. Loading None therefore restores them exactly, and loading many policies one after
    another adds no error.

    An adapter is never merged into weights with less than float32 precision. Rounding the sums would change the
    policy from the one that is trained. Instead, the layers add the adapter's part to their output, as the trainer's
    layers do.
    """

    def __init__(self, model: Any) -> None:
        tied = model.get_input_embeddings().weight
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module.weight is not tied
        }
        self._weights = dict(model.named_parameters())
        self._base: dict[str, torch.Tensor] = {}
        self._own: dict[str, torch.Tensor] = {}
        """The original values, on the CPU, of the weights that `load_weights` has overwritten, by name."""
        self._beside: list[RemovableHandle] = []

    @torch.inference_mode()
    def load(self, adapter: Adapter | None) -> bool:
        """Load an adapter: set the weights of its layers to base + scale * B @ A. None loads the base model.

        With DoRA, each row of the result is rescaled to its trained length (arXiv 2402.09353).

        Returns:
            Whether weights outside the adapter's layers may have changed, too. This is so after `load_weights`,
            because all original weights are restored first.

        Raises:
            ValueError: If the adapter doesn't fit, in which case nothing changes.
        """
        deltas = {} if adapter is None else self._deltas(adapter)
        scale = 0.0 if adapter is None else _scale(adapter.config)
        self._take_out(self._base.keys() - deltas.keys())
        whole = bool(self._own)
        while self._own:
            name, weight = self._own.popitem()
            self._weights[name].copy_(weight)
        for name, delta in deltas.items():
            module = self._modules[name]
            delta = delta.on(module.weight.device)
            if module.weight.dtype == torch.float32:
                base = self._base.setdefault(name, module.weight.clone())
                module.weight.copy_(_merged(base, delta, scale))
            else:
                self._beside.append(module.register_forward_hook(_adding(delta, scale, module.weight)))
        return whole

    @torch.inference_mode()
    def load_weights(self, weights: ModelWeights) -> None:
        """Copy these weights into the model, in the model's dtype.

        Raises:
            ValueError: If they don't fit, in which case nothing changes.
        """
        for name, weight in weights.tensors.items():
            own = self._weights.get(name)
            if own is None or own.shape != weight.shape:
                what = "is not in this model" if own is None else f"is {tuple(own.shape)} in this model"
                raise ValueError(
                    f"weights: {name} of shape {tuple(weight.shape)} {what}; use weights of the same model"
                )
            if not weight.isfinite().all():
                raise ValueError(f"weights: {name} contains a value that is not finite")
        self._take_out(self._base.keys())
        for name in self._own.keys() - weights.tensors.keys():
            self._weights[name].copy_(self._own.pop(name))
        for name, weight in weights.tensors.items():
            own = self._weights[name]
            if name not in self._own:
                self._own[name] = own.to("cpu", copy=True)
            own.copy_(weight)

    def _take_out(self, merged: Iterable[str]) -> None:
        """Restore the original weights of the layers in `merged`, and remove the adapter's hooks from all layers."""
        while self._beside:
            self._beside.pop().remove()
        for name in merged:
            self._modules[name].weight.copy_(self._base[name])

    def _deltas(self, adapter: Adapter) -> dict[str, _Delta]:
        modules: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in adapter.tensors.items():
            match = _NAME.fullmatch(name)
            if match is None or match["module"] not in self._modules:
                raise ValueError(
                    f"adapter: {name} belongs to no linear layer of this model that an adapter can be merged into"
                )
            modules.setdefault(match["module"], {})[match["part"]] = torch.as_tensor(tensor)
        if not modules:
            raise ValueError("adapter: has no tensors; pass None for the base model alone")
        return {module: self._delta(module, parts, adapter.config) for module, parts in modules.items()}

    def _delta(self, module: str, parts: dict[str, torch.Tensor], config: Mapping[str, Any]) -> _Delta:
        wanted = {"A", "B", "magnitude_vector"} if config.get("use_dora") else {"A", "B"}
        if parts.keys() != wanted:
            held, missing = (
                ", ".join(sorted(f"lora_{part}" for part in some)) for some in (parts, wanted - set(parts))
            )
            raise ValueError(f"adapter: {module} has only {held}; missing: {missing or 'use_dora in its config'}")
        out_features, in_features = self._modules[module].weight.shape
        a, b, lengths, rank = parts["A"], parts["B"], parts.get("magnitude_vector"), int(config["r"])
        if a.shape != (rank, in_features) or b.shape != (out_features, rank):
            raise ValueError(
                f"adapter: {module} is {out_features} x {in_features} and r is {rank}, "
                f"but lora_B has shape {tuple(b.shape)} and lora_A {tuple(a.shape)}"
            )
        if lengths is not None and lengths.shape != (out_features,):
            raise ValueError(
                f"adapter: {module} has {out_features} rows, but lora_magnitude_vector has shape {tuple(lengths.shape)}"
            )
        if not all(part.isfinite().all() for part in parts.values()):
            raise ValueError(f"adapter: {module} contains a value that is not finite")
        return _Delta(a, b, lengths)


def _merged(base: torch.Tensor, delta: _Delta, scale: float) -> torch.Tensor:
    """Return the weight with the adapter merged in, in float32."""
    merged = torch.addmm(base.float(), delta.b, delta.a, alpha=scale)
    return merged if delta.lengths is None else merged * (delta.lengths / merged.norm(dim=1))[:, None]


def _adding(delta: _Delta, scale: float, base: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a forward hook that adds the adapter's part, computed in float32, to a layer's output."""
    stretch = (
        None
        if delta.lengths is None
        else delta.lengths / _merged(base, delta._replace(lengths=None), scale).norm(dim=1)
    )

    def add(layer: torch.nn.Linear, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        part = torch.nn.functional.linear(torch.nn.functional.linear(given[0].float(), delta.a), delta.b * scale)
        whole = out.float() + part
        if stretch is not None:
            bias = 0.0 if layer.bias is None else layer.bias.float()
            whole = (whole - bias) * stretch + bias
        return whole.to(out.dtype)

    return add


def _scale(config: Mapping[str, Any]) -> float:
    """Return PEFT's scale: alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732).

    Raises:
        ValueError: If the config has a setting that can't be merged.
    """
    odd = [name for name in _REFUSED if config.get(name)]
    if odd:
        raise ValueError(f"adapter: its config sets {', '.join(odd)}, which this engine cannot merge; train without it")
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)

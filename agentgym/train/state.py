"""The training state: functions that copy it from the trainer and restore it, on any number of ranks."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from agentgym.train.config import TrainConfig, peak_rate
from agentgym.train.policy.adapter_io import whole
from agentgym.train.policy.model import PolicyModel


def new_optimizer(weights: Sequence[Tensor], config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """Create an AdamW optimizer for these weights."""
    # The fused version is faster on a CPU: by default, torch updates each weight separately, with ten small
    # operations.
    fused = True if device.type == "cpu" else None
    decay = config.weight_decay
    return torch.optim.AdamW(weights, lr=peak_rate(config), betas=config.betas, weight_decay=decay, fused=fused)


@torch.no_grad()
def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return full CPU copies of the trained weights and the optimizer's state, by name.

    Every rank must call it.
    """
    names = trained_names(model, optimizer)
    return {
        "weights": {name: whole(weight) for weight, name in names.items()},
        "optimizer": {
            name: {key: whole(value) if isinstance(value, Tensor) else value for key, value in kept.items()}
            for weight, name in names.items()
            if (kept := optimizer.state.get(weight))
        },
    }


@torch.no_grad()
def restore_training(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the weights and the optimizer's moments.

    The optimizer keeps its learning rate, betas and weight decay. Every rank must call it with the same state.

    Raises:
        ValueError: If the state belongs to another model, in which case nothing is changed.
    """
    names = trained_names(model, optimizer)
    saved = {name: weight.shape for name, weight in state["weights"].items()}
    refuse_strangers({name: weight.shape for weight, name in names.items()}, saved)
    for weight, name in names.items():
        weight.copy_(_like(weight, state["weights"][name]))
    kept = state["optimizer"]
    moments: dict[Tensor, dict[str, Any]] = {
        weight: {key: _like(weight, value) for key, value in kept[name].items()}
        for weight, name in names.items()
        if name in kept
    }
    load_moments(optimizer, moments)


def load_moments(optimizer: torch.optim.Optimizer, moments: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Set the optimizer's moments by weight. Its learning rate, betas and weight decay don't change."""
    positions = {weight: i for i, weight in enumerate(w for g in optimizer.param_groups for w in g["params"])}
    groups = [
        {**group, "params": [positions[weight] for weight in group["params"]]} for group in optimizer.param_groups
    ]
    state = {positions[weight]: dict(values) for weight, values in moments.items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def policy_settings(policy: PolicyModel, config: TrainConfig) -> dict[str, Any]:
    """Return the settings that a checkpoint must share with the run that loads its weights, such as the base model.

    With other settings, the weights would be another policy. `refuse_other_policy` compares the settings.
    """
    same = {"method": config.method, "model": policy.base_fingerprint, "temperature": config.temperature}
    if not policy.adapted:
        return same
    adapted = {name.split(".lora_")[0] for name, _ in policy.named_parameters() if ".lora_" in name}
    shape = {name: getattr(config, name) for name in ("lora_rank", "lora_alpha", "rslora", "dora")}
    return same | {"lora_targets": sorted({name.rpartition(".")[2] for name in adapted})} | shape


def refuse_other_policy(own: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
    """Raise ValueError if a checkpoint has another base model or adapter. The message names the difference."""
    if saved is None:
        raise ValueError("checkpoint: its base model and adapter are not recorded; resume from another checkpoint")
    for name, value in own.items():
        if saved.get(name) != value:
            raise ValueError(
                f"checkpoint: was written with {name} {saved.get(name)}, but this run has {value}, which makes it "
                f"another policy; resume with the checkpoint's {name}, or start a new run"
            )


def trained_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """Return the name of each weight that the optimizer updates, in the optimizer's order."""
    found = {weight: name for name, weight in model.named_parameters()}
    return {weight: found[weight] for group in optimizer.param_groups for weight in group["params"]}


def refuse_strangers(own: Mapping[str, torch.Size], saved: Mapping[str, torch.Size]) -> None:
    """Raise ValueError if a checkpoint's weights have other names or shapes than the weights that are trained now."""
    odd = sorted(own.keys() ^ saved.keys())
    odd += sorted(name for name in own.keys() & saved.keys() if own[name] != saved[name])
    if odd:
        raise ValueError(
            f"checkpoint: its weights don't match those that are trained here ({len(odd)} differ, such as {odd[0]}); "
            "resume with the model and the settings that it was written with"
        )


def _like(weight: Tensor, value: Any) -> Any:
    """Return the value sharded like the weight. A counter of the optimizer is returned unchanged."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    if isinstance(weight, DTensor):
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
    return value.to(weight.device)


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Restore the state of every random generator of this process."""
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

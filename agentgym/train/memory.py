"""Memory of the trainer: its estimate, and the settings that follow from it."""

from dataclasses import dataclass, replace

import torch

from agentgym.causal_lm.model_defaults import LARGE, OVERHEAD, Device, ModelShape, micro_batch_tokens, threads
from agentgym.machine.resources import usable_memory, usable_processors
from agentgym.train.config import TrainConfig
from agentgym.train.distributed import Ranks
from agentgym.train.policy.fsdp import weight_type
from agentgym.train.policy.model import PolicyModel

ADAMW_BYTES = 12
"""Bytes per trained weight of its gradient and AdamW's two moments, which are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """The estimated memory of this process's trainer, in bytes."""

    weights: int
    """The model's weights, with the adapter's and those of the frozen copy of the model, if there is one."""
    optimizer: int
    """Gradients and AdamW's moments of the trained weights."""
    activations: int
    """A forward and backward pass over a micro-batch: what autograd keeps, and what the pass needs at its peak."""
    usable: int
    """Memory of the GPU or, on a CPU, the memory that this process may use."""

    @property
    def needed(self) -> int:
        """All parts together."""
        return self.weights + self.optimizer + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """What an open trainer trains, and with how much memory."""

    weights: int
    """Number of the model's weights, without an adapter."""
    trained: int
    """Number of trained weights."""
    coverage: float
    """Fraction of the weights in the decoder's layers that training changes."""
    targets: tuple[str, ...]
    """Short names of the trained weights."""
    dtype: str
    device: str
    memory: TrainerMemory

    @property
    def is_large(self) -> bool:
        """Whether the model has so many weights that a step takes long."""
        return self.weights > LARGE


def describe(config: TrainConfig, policy: PolicyModel, ranks: Ranks, frozen: PolicyModel | None) -> TrainerFacts:
    """Describe this process's open trainer.

    Args:
        config: The trainer's config, with a limit on the tokens of a micro-batch.
        policy: The trained model.
        ranks: The processes that train.
        frozen: A copy of the model as it was before training, if the trainer keeps one.
    """
    weights = list(policy.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    covered = policy.coverage
    return TrainerFacts(
        weights=sum(weight.numel() for weight in weights) - (trained if policy.adapted else 0),
        trained=trained,
        coverage=covered.share,
        targets=covered.adapted,
        dtype=str(weight_type(config, ranks.device)).removeprefix("torch."),
        device=str(ranks.device),
        memory=estimate_memory(config, policy, ranks, frozen),
    )


def follow_model(config: TrainConfig, policy: PolicyModel, ranks: Ranks) -> TrainConfig:
    """Return the config with a value for each setting whose default depends on the loaded model.

    Every rank must call it, and gets the same micro-batches as rank 0.
    """
    device = device_kind(ranks.device)
    weights = sum(weight.numel() for weight in policy.parameters())
    tokens = config.max_tokens_per_microbatch or fitting_tokens(config, policy, ranks.device)
    return replace(
        config,
        max_tokens_per_microbatch=ranks.broadcast(tokens),
        threads=config.threads or threads(weights, device, usable_processors()),
    )


def fitting_tokens(config: TrainConfig, policy: PolicyModel, device: torch.device) -> int:
    """Return the default number of tokens in a micro-batch, for which the device has enough memory."""
    return micro_batch_tokens(kept_bytes(config, policy, device), device_kind(device), device_memory(device))


def kept_bytes(config: TrainConfig, policy: PolicyModel, device: torch.device) -> int:
    """Estimate the bytes per token that autograd keeps between a forward and a backward pass."""
    return ModelShape.of(policy.causal.config).activation_bytes(
        method=config.method,
        itemsize=weight_type(config, device).itemsize,
        checkpointing=config.gradient_checkpointing,
    )


def estimate_memory(
    config: TrainConfig, policy: PolicyModel, ranks: Ranks, frozen: PolicyModel | None
) -> TrainerMemory:
    """Estimate the memory of this process's trainer; its arguments are those of `describe`."""
    weights = [weight for model in (policy, frozen) if model is not None for weight in model.parameters()]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    shards = ranks.world // config.replicas
    stored = sum(weight.numel() * weight.element_size() for weight in weights)
    kept = kept_bytes(config, policy, ranks.device) * (config.max_tokens_per_microbatch or 0)
    return TrainerMemory(
        weights=stored // shards,
        optimizer=ADAMW_BYTES * trained // shards,
        activations=int(kept * OVERHEAD[device_kind(ranks.device)]),
        usable=device_memory(ranks.device),
    )


def device_kind(device: torch.device) -> Device:
    """Return the kind of device that defaults depend on."""
    return "cuda" if device.type == "cuda" else "cpu"


def device_memory(device: torch.device) -> int:
    """Return the bytes of memory of the GPU or, for a CPU, those that this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return usable_memory()

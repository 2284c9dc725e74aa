"""The policy on its ranks: loading, sharding with FSDP2, and activation checkpointing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from agentgym.causal_lm.decoder import decoder_of
from agentgym.train.config import TrainConfig
from agentgym.train.distributed import Ranks
from agentgym.train.policy.model import (
    AdapterShape,
    PolicyModel,
    Way,
    empty_policy,
    go_way,
    load_policy,
    load_whole_policy,
)
from agentgym.train.policy.row import as_now


def open_policy(path: Path | str, config: TrainConfig, ranks: Ranks, *, seed: int) -> PolicyModel:
    """Return the policy on this rank's device, sharded if there are several ranks or the config requires it.

    Only rank 0 reads the weights, except that with `offload` every rank reads them. Every rank must call it.

    Raises:
        ValueError: On all ranks, if the model can't be read, if `offload` is set without a GPU or without shards, or
            if the ranks can't be divided into the replicas.
    """
    sharded = ranks.world > 1 or shards_alone(config, ranks.device)
    if ranks.world % config.replicas:
        raise ValueError(
            f"replicas: {ranks.world} processes cannot be divided into {config.replicas} copies of the same size; set "
            f"a divisor of {ranks.world}"
        )
    if config.offload and ranks.device.type == "cpu":
        raise ValueError("offload: moves shards from a GPU to the CPU, but the device is the CPU; set offload=False")
    if config.offload and not sharded:
        raise ValueError(
            "offload: moves shards, but the model is not sharded; also set shard=True, or start several processes"
        )
    return _open(path, config, ranks, sharded, partial(_load, path, config, ranks, seed), _shape(config))


def open_reference(path: Path | str, config: TrainConfig, ranks: Ranks) -> PolicyModel:
    """Return the frozen reference model for the KL divergence of a policy that is trained whole, without an adapter.

    It is sharded in the same way as the policy, and has the data type that the policy computes in. Every rank must
    call it.
    """
    sharded = ranks.world > 1 or shards_alone(config, ranks.device)
    dtype = weight_type(config, ranks.device)
    load = partial(load_whole_policy, path, dtype=dtype, trained=False, layout=config.layout)
    return _open(path, replace(config, gradient_checkpointing=False), ranks, sharded, load, None, trained=False)


def _open(
    path: Path | str,
    config: TrainConfig,
    ranks: Ranks,
    sharded: bool,
    load: Callable[..., PolicyModel],
    shape: AdapterShape | None,
    *,
    trained: bool = True,
) -> PolicyModel:
    if ranks.world > 1 and not config.offload:
        empty = partial(
            empty_policy,
            path,
            dtype=stored_type(config, ranks.device) if trained else weight_type(config, ranks.device),
            shape=shape,
            trained=trained,
        )
        return _from_the_first(path, config, ranks, load, empty)
    policy = load(device=None if config.offload else ranks.device)
    _arrange(policy, config, ranks, sharded=sharded)
    return policy


def _from_the_first(
    path: Path | str,
    config: TrainConfig,
    ranks: Ranks,
    load: Callable[..., PolicyModel],
    empty: Callable[[], PolicyModel],
) -> PolicyModel:
    """Build an empty policy on each rank, shard it, and fill it with the weights, which only rank 0 loads.

    `load` returns the policy with its weights, and `empty` the one without. `path` is only for the error message.

    Raises:
        ValueError: On all ranks, if rank 0 can't load the policy.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    source, error = None, ""
    if ranks.rank == 0:
        try:
            source = load(device=None)
        except Exception as failure:  # raised on every rank, because the others would wait forever
            error = f"{type(failure).__name__}: {failure}"
    found = ("", Way()) if source is None else (source.base_fingerprint, source.way)
    error, base_fingerprint, way = ranks.broadcast((error, *found))
    if error:
        raise ValueError(f"model: rank 0 could not load {path}: {error}")
    policy = empty()
    policy.base_fingerprint = base_fingerprint
    if source is not None:  # for saving: how the weights are split and named in the model's files
        policy.causal._weight_conversions = getattr(source.causal, "_weight_conversions", None)
    go_way(policy, way)
    _arrange(policy, config, ranks, sharded=True)
    policy.to_empty(device=ranks.device)
    weights = {} if source is None else source.state_dict()
    set_model_state_dict(policy, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Rotary frequencies must be copied too: they are not in a state dict, and were not computed on the meta device.
    computed = {} if source is None else dict(source.named_buffers())
    for name, buffer in policy.named_buffers():
        if computed:
            buffer.copy_(computed[name])
        dist.broadcast(buffer, src=0)
    return policy


def _load(
    path: Path | str, config: TrainConfig, ranks: Ranks, seed: int, *, device: torch.device | None
) -> PolicyModel:
    dtype, shape = stored_type(config, ranks.device), _shape(config)
    if shape is None:
        return load_whole_policy(path, dtype=dtype, layout=config.layout, device=device)
    return load_policy(path, dtype=dtype, seed=seed, layout=config.layout, device=device, **shape)


def _shape(config: TrainConfig) -> AdapterShape | None:
    if config.method == "full":
        return None
    return AdapterShape(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        targets=config.lora_targets,
        rslora=config.rslora,
        dora=config.dora,
    )


def weight_type(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the data type that the model computes in.

    auto means bfloat16 on a GPU that supports it natively, and float32 elsewhere.
    """
    if config.dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def stored_type(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the data type in which the model's weights are stored, which is float32 if the whole model is trained."""
    return torch.float32 if config.method == "full" else weight_type(config, device)


def shards_alone(config: TrainConfig, device: torch.device) -> bool:
    """Return whether to shard the model with FSDP2 even in a single process.

    This is needed if trained float32 weights must be rounded to another data type for computing, which FSDP2 does.
    """
    return config.shard or stored_type(config, device) != weight_type(config, device)


def _arrange(policy: PolicyModel, config: TrainConfig, ranks: Ranks, *, sharded: bool) -> None:
    if config.gradient_checkpointing:
        checkpoint_layers(policy)
    if sharded:
        dtype = weight_type(config, ranks.device)
        shard(policy, ranks.device, dtype=dtype, offload=config.offload, replicas=config.replicas)


def checkpoint_layers(policy: PolicyModel) -> None:
    """Store only each decoder layer's input in the forward pass, and recompute the layer in the backward pass."""
    for layer in _layers(policy, "gradient_checkpointing"):
        # Wrapped inside the layer's hooks, with which FSDP gathers its weights. Dropout is off, so recomputing is
        # exact.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
        )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a layer's first computation and of its recomputation, which may run in another thread."""
    return nullcontext(), as_now()


def _layers(policy: PolicyModel, setting: str) -> Any:
    """Return the decoder's layers.

    Raises:
        ValueError: If the model has no list of layers. The message names the setting that needs one.
    """
    lists = [part for part in decoder_of(policy.causal).children() if isinstance(part, nn.ModuleList)]
    count = policy.causal.config.get_text_config().num_hidden_layers
    layers = [part for part in lists if len(part) == count]
    if not layers:
        raise ValueError(
            f"{setting}: {policy.causal.config.model_type} has no list of its {count} decoder layers; train it on one "
            "process with gradient_checkpointing=False and shard=False, and with method='full' also dtype='float32'"
        )
    return layers[0]


def shard(
    policy: PolicyModel,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
    replicas: int = 1,
) -> None:
    """Shard every decoder layer and the root in place (FSDP2), over all ranks or over the ranks of each replica.

    Sharding replaces the parameter objects, so the optimizer must be created afterward.

    Args:
        policy: The policy to shard.
        device: Device of the shards.
        dtype: Data type of all computation. Trained weights, their gradients and moments stay float32.
        offload: Whether to keep shards, gradients and optimizer on the CPU.
        replicas: Number of copies of the sharded model, which must divide the number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method as gathers,
    )

    world = dist.get_world_size()
    # One row per replica. The ranks in a row are neighbors, such as those of one node, and shard the same replica.
    sizes = (world,) if replicas == 1 else (replicas, world // replicas)
    how: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "shard")[-len(sizes) :]),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    if dtype != torch.float32:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in _layers(policy, "shard"):
        fully_shard(layer, **how)
    fully_shard(policy, **how)
    gathers(policy, "states")

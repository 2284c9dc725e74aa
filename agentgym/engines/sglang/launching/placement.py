"""Assigns GPUs to launched servers and to training processes."""

import os
from collections.abc import Sequence
from pathlib import Path

from agentgym.engines.sglang.config import SGLangConfig


def visible_gpus() -> list[str]:
    """Return this process's GPUs as named in CUDA_VISIBLE_DEVICES, or an empty list on a machine without GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return [str(number) for number in range(len(devices))]  # in a container, GPUs are numbered from 0


def place_servers(config: SGLangConfig, visible: Sequence[str], *, trainers: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the GPUs of each server to launch: `tp` GPUs per server, or none if the machine has no GPUs.

    No two servers share a GPU. A server shares GPUs with a trainer only if `config.colocate` allows it.

    Args:
        config: The servers to launch. If `config.gpus` is empty, the servers get the GPUs that no trainer uses, in
            order. With `config.colocate`, they also get the trainers' GPUs.
        visible: The GPUs that this process sees.
        trainers: Indices of the trainers' GPUs among the visible ones.

    Raises:
        ValueError: If the servers don't fit on the GPUs. The message names the setting.
    """
    if not visible and not config.gpus:
        return [()] * config.servers
    wanted = config.servers * config.tp
    chosen = config.gpus or _free(config, visible, trainers)
    _refuse(config, chosen, wanted, visible, trainers)
    names = [visible[place] for place in chosen[:wanted]]
    return [tuple(names[first : first + config.tp]) for first in range(0, wanted, config.tp)]


def _free(config: SGLangConfig, visible: Sequence[str], trainers: Sequence[int]) -> tuple[int, ...]:
    taken = () if config.colocate != "off" else trainers
    return tuple(place for place in range(len(visible)) if place not in taken)


def _refuse(
    config: SGLangConfig, chosen: Sequence[int], wanted: int, visible: Sequence[str], trainers: Sequence[int]
) -> None:
    asked = f"{config.servers} servers with tp={config.tp} need {wanted} GPUs"
    there = f"this process sees {len(visible)} ({', '.join(visible) or 'none'})"
    beyond = [place for place in chosen if place >= len(visible)]
    if beyond:
        raise ValueError(f"gpus: {beyond} do not exist; {there}, numbered from 0")
    shared = sorted(set(chosen) & set(trainers))
    if config.gpus and shared and config.colocate == "off":
        raise ValueError(
            f"gpus: {shared} are used by the trainer, one per process; assign others to the servers, or share them "
            "with colocate='keep' or 'drop'"
        )
    if config.gpus and len(chosen) != wanted:
        raise ValueError(f"gpus: {asked}, but {len(chosen)} are listed; list {wanted}, or change servers or tp")
    if len(chosen) < wanted:
        held = f", and the trainer uses {len(trainers)} of them" if trainers and config.colocate == "off" else ""
        raise ValueError(
            f"servers, tp: {asked}; {there}{held}; launch fewer, start fewer trainers, or set colocate='keep' or 'drop'"
        )

"""The group of processes that train together, as started by torchrun."""

import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentgym.hub import gpu_number

APART = timedelta(hours=12)
"""Longest time for which one process may wait for another in a call that all of them must make. A process waits, for
example, while another one runs its longest rollouts. If a process dies, torchrun terminates the others.
"""
WORKERS_END_S = 10.0
"""Maximum number of seconds to wait, after the group is closed, for the threads of gloo (torch's CPU communication) to
end.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The place of this process among the processes that train together, and its communication with them."""

    rank: int
    world: int
    device: torch.device
    owned: bool
    """Whether this object opened the process group and will close it."""

    def gather(self, objects: list[Any]) -> list[Any]:
        """Return all ranks' objects in rank order, on every rank. Every rank must call it."""
        if self.world == 1:
            return list(objects)
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, objects)
        return [item for part in parts for item in part]

    def gather_on_first(self, items: dict[Any, Any]) -> dict[Any, Any]:
        """Return all ranks' items as one dict on rank 0 and an empty dict on the others. Every rank must call it."""
        if self.world == 1:
            return items
        parts: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(items, parts, dst=0)
        return {key: value for part in parts or () for key, value in part.items()}

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Every rank must call it, but the other ranks' values are ignored."""
        if self.world == 1:
            return value
        objects = [value]
        dist.broadcast_object_list(objects, src=0)
        return objects[0]

    def close(self) -> None:
        """Close the process group if this object opened it."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()
            _wait_for_workers()


def open_ranks(device: str, *, group: bool = False) -> Ranks:
    """Join the processes that torchrun started, and return this process's place among them.

    A single process gets a process group only if `group` is true, which is needed if the model is sharded with FSDP2.
    Communication uses gloo on the CPU and nccl on GPUs. A process group that is already open is used and left open.
    """
    chosen = find_device(device)
    owned = False
    if not dist.is_initialized():
        backend = "gloo" if chosen.type == "cpu" else "cpu:gloo,cuda:nccl"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            gpu = chosen if chosen.type == "cuda" else None
            dist.init_process_group(backend, device_id=gpu, timeout=APART)
            owned = True
        elif group:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            owned = True
    if not dist.is_initialized():
        return Ranks(rank=0, world=1, device=chosen, owned=False)
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=chosen, owned=owned)


def all_came() -> bool:
    """Return whether torchrun's processes have opened their process group; always true for a single process."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized()


def _wait_for_workers() -> None:
    """Wait until no gloo thread uses a tensor, for at most WORKERS_END_S seconds. Does nothing except on Linux.

    FSDP keeps its process group, and with it gloo's threads, until the process ends. If such a thread releases a
    tensor while Python shuts down, it requests the GIL, which aborts the process with SIGABRT.
    """
    give_up = time.monotonic() + WORKERS_END_S
    seen_asleep = 0
    while sys.platform == "linux" and seen_asleep < 2 and time.monotonic() < give_up:
        seen_asleep = seen_asleep + 1 if all(state == "S" for state in _worker_states()) else 0
        time.sleep(0.001)


def _worker_states() -> list[str]:
    """Return the kernel's state letter of each gloo thread in this process."""
    states = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(") ")
        except OSError:  # the thread has ended
            continue
        if name == "pt_gloo_runloop":
            states.append(rest[0])
    return states


def find_device(name: str) -> torch.device:
    """Return the trainer's device by its name. "auto" is a GPU if there is one.

    Raises:
        ValueError: If the device doesn't exist here, or if several processes would share one GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if name == "cpu":
        return torch.device(name)
    device = torch.device("cuda", gpu_number(name, gpus))
    if ":" in name and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ValueError(f"device: each process needs its own GPU, but {name} is a single one; set device to cuda")
    torch.cuda.set_device(device)
    return device


def gpus_here(device: str) -> tuple[int, ...]:
    """Return the numbers of this machine's GPUs that the processes train on. `device` is the trainer's device.

    The numbers count only the GPUs that the processes can see, from 0.
    """
    if device == "cpu":
        return ()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > 1:
        return tuple(range(processes))
    return (int(device.partition(":")[2] or os.environ.get("LOCAL_RANK", "0")),)

"""The script that every rank of test_layout_ranks.py runs: one step per layout, merged and unmerged.

It returns metrics and gradients.
"""

import pickle
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from agentgym.train.batching.layouts import Layout
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.sample import Sample

Gradients = list[torch.Tensor]


def step(trainer: Trainer, rows: list[Sample]) -> tuple[dict[str, float], Gradients]:
    """Return a step's metrics and the whole gradients that the optimizer got."""
    seen: Gradients = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for grad in (weight.grad for weight in group["params"]):
                seen.append(grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())

    hook = register_optimizer_step_pre_hook(keep)
    try:
        return trainer.train(rows), seen
    finally:
        hook.remove()


def steps(model: Path, config: TrainConfig, batches: dict[bool, list[Sample]]) -> dict[Any, Any]:
    """Run one step per layout and merging, and return the results by (layout, merged)."""
    found = {}
    for layout, merged in product(get_args(Layout), batches):
        with Trainer(model, replace(config, layout=layout)) as trainer:
            found[layout, merged] = step(trainer, batches[merged])
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = steps(*pickle.loads(Path(sys.argv[1]).read_bytes()))
    if dist.get_rank() == 0:
        (Path(sys.argv[2]) / "out").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()

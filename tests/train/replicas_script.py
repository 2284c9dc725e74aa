"""The script that every rank of test_replicas.py runs: `torchrun replicas_script.py INPUT OUTPUT_FOLDER`."""

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.sample import Sample


def train(trainer: Trainer, batches: Sequence[list[Sample]]) -> list[dict[str, float]]:
    return [{k: v for k, v in trainer.train(batch).items() if k != "train/seconds"} for batch in batches]


def weights(trainer: Trainer) -> dict[str, Any]:
    given = trainer.adapter() if trainer.adapts else trainer.weights()
    assert given is not None
    return {name: tensor.float().numpy() for name, tensor in given.tensors.items()}


def held(trainer: Trainer) -> int:
    """Return the bytes of model weights that this rank stores."""
    parameters = trainer._open_now.learner.policy.parameters()
    local = (each.to_local() if isinstance(each, DTensor) else each for each in parameters)
    return sum(each.numel() * each.element_size() for each in local)


def refusal(model: Path, config: TrainConfig) -> str:
    try:
        with Trainer(model, config):
            return "nothing"
    except ValueError as error:
        return str(error)


def main(model: Path, config: TrainConfig, batches: list[list[Sample]], out: Path) -> dict[str, Any]:
    kinds = {"one": config, "two": replace(config, replicas=2)}
    found: dict[str, Any] = {"refused": refusal(model, replace(config, replicas=3))}
    for name, each in kinds.items():
        with Trainer(model, each) as trainer:
            first = train(trainer, batches[:1])
            trainer.checkpoint(out / name, 1, run={"said": name})
            found[name] = (first + train(trainer, batches[1:]), weights(trainer), held(trainer))
    for name, other in (("one", "two"), ("two", "one")):
        with Trainer(model, kinds[name]) as trainer:
            resumed_at = trainer.resume(out / other)
            found[f"{name} from {other}"] = (train(trainer, batches[1:]), weights(trainer), resumed_at)
    return found


MODEL, CONFIGS, BATCHES = pickle.loads(Path(sys.argv[1]).read_bytes())
OUT = Path(sys.argv[2])
dist.init_process_group("gloo")  # one group for all trainers
RESULT = {name: main(MODEL, config, BATCHES, OUT / name) for name, config in CONFIGS.items()}
(OUT / f"rank{dist.get_rank()}.pickle").write_bytes(pickle.dumps(RESULT))
dist.destroy_process_group()

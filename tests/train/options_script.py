"""The script that every rank of test_options.py runs: `torchrun options_script.py INPUT OUTPUT_FOLDER`."""

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.sample import Sample


def metrics(model: Path, config: TrainConfig, batches: list[list[Sample]]) -> dict[str, Any]:
    """Return all results of a run, or the error that refused it."""
    try:
        with Trainer(model, config) as trainer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return {
                "stats": [trainer.train(batch) for batch in batches],
                "tensors": {name: tensor.numpy() for name, tensor in trainer.adapter().tensors.items()},
                "scores": trainer.score([3, 1, 4, 1, 5], sampling=Sampling()),
                "warned": [str(warning.message) for warning in caught if warning.category is RuntimeWarning],
            }
    except ValueError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    dist.init_process_group("gloo")  # one for all runs
    runs = pickle.loads(Path(sys.argv[1]).read_bytes())
    results = {name: metrics(*run) for name, run in runs.items()}
    (Path(sys.argv[2]) / f"rank{dist.get_rank()}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()

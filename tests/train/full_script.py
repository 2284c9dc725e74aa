"""The script that every rank of test_full.py runs: `torchrun full_script.py INPUT OUTPUT_FOLDER`."""

import pickle
import sys
from pathlib import Path

from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.sample import Sample
from tests.train.full_training import IDS, Result, train


def main(model: Path, config: TrainConfig, batches: list[list[Sample]], alone: Path, out: Path) -> None:
    with Trainer(model, config) as trainer:
        trained: Result = train(trainer, batches)
        only_first = trainer.weights(first_only=True)
        trainer.save(out / "model")
        scores = trainer.score(IDS, sampling=Sampling())
        resumed_at = trainer.resume(alone)
        trainer.checkpoint(out / "two", 1, run={"said": "by two"})
        result = {
            "trained": trained,
            "kept": only_first is not None,
            "scores": scores,
            "resumed_at": resumed_at,
            "resumed": train(trainer, batches[1:]),
        }
        (out / f"rank{trainer.rank}.pickle").write_bytes(pickle.dumps(result))


MODEL, CONFIG, BATCHES, ALONE = pickle.loads(Path(sys.argv[1]).read_bytes())
main(MODEL, CONFIG, BATCHES, ALONE, Path(sys.argv[2]))

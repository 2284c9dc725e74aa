"""The script that every rank of test_checkpoint.py runs: `torchrun checkpoint_script.py INPUT OUTPUT_FOLDER`.

It writes a checkpoint after the first batch, then resumes from one that a single process wrote.
"""

import pickle
import sys
from pathlib import Path

from agentgym.errors import AgentGymError
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.sample import Sample


def main(model: Path, config: TrainConfig, batches: list[list[Sample]], alone: Path, out: Path) -> None:
    with Trainer(model, config) as trainer:
        trainer.train(batches[0])
        trainer.checkpoint(out / "two", 1, run={"said": "by two"})
        try:
            trainer.resume(out / "nowhere")
            refused = ""
        except (ValueError, AgentGymError) as error:
            refused = str(error)
        step, run = trainer.resume(alone)
        stats = [trainer.train(batch) for batch in batches[1:]]
        tensors = {name: tensor.numpy() for name, tensor in trainer.adapter().tensors.items()}
        trainer.merge(out / "merged")
        result = {"refused": refused, "step": step, "run": run, "stats": stats, "tensors": tensors}
        (out / f"rank{trainer.rank}.pickle").write_bytes(pickle.dumps(result))


MODEL, CONFIG, BATCHES, ALONE = pickle.loads(Path(sys.argv[1]).read_bytes())
main(MODEL, CONFIG, BATCHES, ALONE, Path(sys.argv[2]))

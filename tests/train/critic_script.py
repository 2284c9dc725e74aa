"""The script that every rank of test_critic.py runs: `torchrun critic_script.py INPUT OUTPUT_FOLDER`."""

import pickle
import sys
from pathlib import Path

from agentgym.samples import value_samples
from agentgym.train.trainer import Trainer

MODEL, CONFIG, BATCHES = pickle.loads(Path(sys.argv[1]).read_bytes())
done = []
with Trainer(MODEL, CONFIG) as trainer:
    for groups in BATCHES:
        batch = value_samples(groups, trainer.values)
        metrics = {name: value for name, value in trainer.train(batch).items() if name != "train/seconds"}
        done.append((metrics, [sample.advantages.tolist() for sample in batch]))
    rank = trainer.rank
(Path(sys.argv[2]) / f"rank{rank}.pickle").write_bytes(pickle.dumps(done))

"""What every rank of test_fsdp.py runs: `torchrun fsdp_script.py INPUT OUTPUT_FOLDER`; plain python for one process."""

import asyncio
import pickle
import sys
import time
from pathlib import Path

from agentgym.train import trainer as trainer_module
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.train.weights import write_adapter
from agentgym.types import Adapter, Sample, Sampling


def slow_disk(adapter: Adapter, path: Path) -> None:
    """Rank 0 is the one that writes: give the others all the time to look too early."""
    time.sleep(0.5)
    write_adapter(adapter, path)


async def main(model: Path, config: TrainConfig, batches: list[list[Sample]], out: Path) -> None:
    async with Trainer(model, config) as trainer:
        stats = [await trainer.step(batch) for batch in batches]
        empty = await trainer.step([])
        refused = ""
        try:  # ranks that hold different samples
            await trainer.step(batches[0][trainer.rank :])
        except ValueError as error:
            refused = str(error)
        trainer.save(out / "adapter")
        written = await asyncio.to_thread((out / "adapter" / "adapter_config.json").exists)
        result = {
            "written": written,
            "stats": stats,
            "empty": empty,
            "refused": refused,
            "gathered": trainer.gather([trainer.rank, f"rank {trainer.rank}"]),
            "tensors": {name: tensor.numpy() for name, tensor in trainer.adapter().tensors.items()},
            "scores": trainer.score([3, 1, 4, 1, 5], sampling=Sampling()),
        }
        name = f"rank{trainer.rank}.pickle"
    await asyncio.to_thread((out / name).write_bytes, pickle.dumps(result))


vars(trainer_module)["write_adapter"] = slow_disk
MODEL, CONFIG, BATCHES = pickle.loads(Path(sys.argv[1]).read_bytes())
asyncio.run(main(MODEL, CONFIG, BATCHES, Path(sys.argv[2])))

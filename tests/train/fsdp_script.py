"""The script that every rank of test_fsdp.py runs: `torchrun fsdp_script.py INPUT OUTPUT_FOLDER`.

One process runs it with plain python.
"""

import asyncio
import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from agentgym.train import trainer as trainer_module
from agentgym.train.policy.adapter_io import write_adapter
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.sample import Sample
from agentgym.types.weights import Adapter


def slow_disk(adapter: Adapter, path: Path, files: Mapping[str, str]) -> None:
    """Write slowly on rank 0, so that other ranks that don't wait would look too early."""
    time.sleep(0.5)
    write_adapter(adapter, path, files)


def unlike(rows: list[Sample], rank: int) -> dict[str, list[Sample]]:
    """Return samples that differ between ranks in one respect, and samples that are wrong on all ranks."""
    first, *rest = rows
    ids, worth, said = first.response_ids.copy(), first.advantages.copy(), first.logprobs.copy()
    ids[-1], worth[first.loss_mask], said[first.loss_mask] = 2 + rank, 1.0 + rank, -1.0 - rank
    mask = first.loss_mask.copy()
    mask[mask.argmax()] = rank == 0
    far = first.response_ids.copy()
    far[0] = 999
    return {
        "count": rows[rank:],
        "ids": [replace(first, response_ids=ids), *rest],
        "advantages": [replace(first, advantages=worth), *rest],
        "logprobs": [replace(first, logprobs=said), *rest],
        "mask": [replace(first, loss_mask=mask), *rest],
        "weight": [replace(first, weight=0.5 + rank / 4), *rest],
        "vocabulary": [replace(first, response_ids=far), *rest],
    }


async def refusal(trainer: Trainer, rows: list[Sample]) -> str:
    """Return the error for these samples."""
    try:
        await trainer.step(rows)
    except ValueError as error:
        return str(error)
    return "nothing"


async def main(model: Path, config: TrainConfig, batches: list[list[Sample]], out: Path) -> None:
    async with Trainer(model, config) as trainer:
        stats = [await trainer.step(batch) for batch in batches]
        empty = await trainer.step([])
        refused = {name: await refusal(trainer, rows) for name, rows in unlike(batches[1], trainer.rank).items()}
        trainer.save(out / "adapter")
        written = await asyncio.to_thread((out / "adapter" / "adapter_config.json").exists)
        result = {
            "written": written,
            "stats": stats,
            "empty": empty,
            "refused": refused,
            "gathered": await trainer.gather([trainer.rank, f"rank {trainer.rank}"]),
            "tensors": {name: tensor.numpy() for name, tensor in trainer.adapter().tensors.items()},
            "scores": trainer.score([3, 1, 4, 1, 5], sampling=Sampling()),
        }
        name = f"rank{trainer.rank}.pickle"
    await asyncio.to_thread((out / name).write_bytes, pickle.dumps(result))


vars(trainer_module)["write_adapter"] = slow_disk
MODEL, CONFIG, BATCHES = pickle.loads(Path(sys.argv[1]).read_bytes())
asyncio.run(main(MODEL, CONFIG, BATCHES, Path(sys.argv[2])))

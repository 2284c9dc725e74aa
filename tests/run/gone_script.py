"""The script of every rank in test_ranks.py: files are removed while the first rank writes step 2's checkpoint."""

import asyncio
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import agentgym as ag
from agentgym.train.snapshot import Snapshot

if __name__ == "__main__":
    dist.init_process_group("gloo")
    write = Snapshot.write_checkpoint
    gone = set[Path]()

    def writing(self: Snapshot, folder: Path, step: int, **named: Any) -> None:
        """Remove the folder after which the run is named, once, and then write."""
        run = folder.parent
        if step == 2 and dist.get_rank() == 0 and run not in gone:
            gone.add(run)
            shutil.rmtree(run if run.name == "run" else run / run.name)
        write(self, folder, step, **named)

    Snapshot.write_checkpoint = writing  # type: ignore[method-assign]
    for each in pickle.loads(Path(sys.argv[1]).read_bytes()):
        asyncio.run(ag.train_policy(each))
    dist.destroy_process_group()

"""The script of every rank in test_ranks.py: one training run after another, each with `ag.train_policy`."""

import asyncio
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

import agentgym as ag

if __name__ == "__main__":
    dist.init_process_group("gloo")  # one for all of the runs
    for run in pickle.loads(Path(sys.argv[1]).read_bytes()):
        asyncio.run(ag.train_policy(run))
    dist.destroy_process_group()

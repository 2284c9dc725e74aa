"""Runs that a script starts, and continues when it is started again."""

import asyncio
import shutil
from dataclasses import replace

import agentgym as ag
from agentgym.files.folder_lock import hold_folder
from agentgym.run.resume import CHECKPOINTS
from agentgym.train.checkpoint import has_checkpoints


def continue_run(run: ag.RunConfig) -> None:
    """Train until `max_steps`, from the last checkpoint in `output_dir` if there is one, otherwise from the start.

    Raises:
        FolderInUse: If another process runs it.
    """
    folder = run.output_dir
    assert folder is not None
    if has_checkpoints(folder / CHECKPOINTS):
        run = replace(run, resume=folder, output_dir=None)
    elif folder.exists():
        with hold_folder(folder):
            shutil.rmtree(folder)  # it was stopped before its first checkpoint
    asyncio.run(ag.train_policy(run))

"""Train language-model agents by reinforcement learning.

An environment is one class, a test needs no GPU, a recipe is one file. Importing this loads none of the
heavy packages; `LocalEngine`, `Trainer` and the boxes load theirs when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from agentgym.env import Compact, Env, KeepLast, Limits, Procedural, ToolEnv, Window, register, reward
from agentgym.errors import ToolError
from agentgym.extras import needs_extra
from agentgym.rollouts.draw import batches
from agentgym.rollouts.episode import rollout
from agentgym.rollouts.group import run_groups
from agentgym.rollouts.oversample import Oversample
from agentgym.rollouts.schedule import Scheduler
from agentgym.samples import samples
from agentgym.tools import Stop, tool
from agentgym.types import ExecResult, Group, Message, Rollout, Sample, Sampling, StepResult, Task

if TYPE_CHECKING:
    from agentgym.command import main
    from agentgym.evaluation import Evaluation, evaluate
    from agentgym.log import Log
    from agentgym.loop import Play, Run, learn, sync
    from agentgym.rollouts.adapter_files import read_adapter
    from agentgym.rollouts.local import LocalConfig, LocalEngine
    from agentgym.rollouts.sglang import SGLangConfig, SGLangEngine
    from agentgym.sandboxes.choose import AnyBox
    from agentgym.sandboxes.docker import Docker
    from agentgym.sandboxes.local import Bubblewrap, Process
    from agentgym.train.config import TrainConfig
    from agentgym.train.trainer import Trainer

__all__ = [
    "AnyBox",
    "Bubblewrap",
    "Compact",
    "Docker",
    "Env",
    "Evaluation",
    "ExecResult",
    "Group",
    "KeepLast",
    "Limits",
    "LocalConfig",
    "LocalEngine",
    "Log",
    "Message",
    "Oversample",
    "Play",
    "Procedural",
    "Process",
    "Rollout",
    "Run",
    "SGLangConfig",
    "SGLangEngine",
    "Sample",
    "Sampling",
    "Scheduler",
    "StepResult",
    "Stop",
    "Task",
    "ToolEnv",
    "ToolError",
    "TrainConfig",
    "Trainer",
    "Window",
    "batches",
    "evaluate",
    "learn",
    "main",
    "read_adapter",
    "register",
    "reward",
    "rollout",
    "run_groups",
    "samples",
    "sync",
    "tool",
]

_LAZY = {
    "agentgym.command": ("main",),
    "agentgym.evaluation": ("Evaluation", "evaluate"),
    "agentgym.log": ("Log",),
    "agentgym.loop": ("Play", "Run", "learn", "sync"),
    "agentgym.rollouts.local": ("LocalConfig", "LocalEngine"),
    "agentgym.rollouts.sglang": ("SGLangConfig", "SGLangEngine"),
    "agentgym.sandboxes.choose": ("AnyBox",),
    "agentgym.sandboxes.docker": ("Docker",),
    "agentgym.sandboxes.local": ("Bubblewrap", "Process"),
    "agentgym.rollouts.adapter_files": ("read_adapter",),
    "agentgym.train.config": ("TrainConfig",),
    "agentgym.train.trainer": ("Trainer",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym' has no attribute {name!r}")
    with needs_extra():
        return getattr(importlib.import_module(_HOME[name]), name)

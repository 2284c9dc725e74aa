"""Train language-model agents by reinforcement learning.

An environment is one class, a test needs no GPU, a recipe is one file. Importing this loads none of the
heavy packages; `LocalEngine`, `Trainer` and the boxes load theirs when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from agentgym.boxes import ExecResult
from agentgym.environments.context_policies import Compact, KeepLast, Window
from agentgym.environments.env import Env, Procedural
from agentgym.environments.limits import Limits
from agentgym.environments.registry import register
from agentgym.environments.rewards import reward
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import ToolError
from agentgym.extras import needs_extra
from agentgym.messages import Message
from agentgym.rollouts.rollout import rollout
from agentgym.samples import samples
from agentgym.scheduling.oversampling import Oversample
from agentgym.scheduling.run_groups import run_groups
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import batches
from agentgym.tools.tool import Stop, tool
from agentgym.types import Group, Rollout, Sample, Sampling, StepResult, Task

if TYPE_CHECKING:
    from agentgym.engines.adapter_files import read_adapter
    from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
    from agentgym.engines.transformers.engine import LocalConfig, LocalEngine
    from agentgym.run.command import main
    from agentgym.run.config import Run
    from agentgym.run.distributed_rollouts import Play
    from agentgym.run.evaluation import Evaluation, evaluate
    from agentgym.run.log import Log
    from agentgym.run.loop import learn, sync
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
    "agentgym.run.command": ("main",),
    "agentgym.run.evaluation": ("Evaluation", "evaluate"),
    "agentgym.run.log": ("Log",),
    "agentgym.run.loop": ("Play", "Run", "learn", "sync"),
    "agentgym.engines.transformers.engine": ("LocalConfig", "LocalEngine"),
    "agentgym.engines.sglang.engine": ("SGLangConfig", "SGLangEngine"),
    "agentgym.sandboxes.choose": ("AnyBox",),
    "agentgym.sandboxes.docker": ("Docker",),
    "agentgym.sandboxes.local": ("Bubblewrap", "Process"),
    "agentgym.engines.adapter_files": ("read_adapter",),
    "agentgym.train.config": ("TrainConfig",),
    "agentgym.train.trainer": ("Trainer",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym' has no attribute {name!r}")
    with needs_extra():
        return getattr(importlib.import_module(_HOME[name]), name)

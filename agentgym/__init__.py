"""Train language-model agents by reinforcement learning.

An environment is one class, a test needs no GPU, a recipe is one file. All that a user needs is here; what tests need
is in `agentgym.testing`. Importing this package loads none of the heavy packages; `LocalEngine`, `Trainer` and the
boxes load theirs when they are first used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from agentgym.agents.env import AgentEnv
from agentgym.asking.judge import Judge
from agentgym.asking.user import SimulatedUser, UserEnv
from agentgym.boxes import Box, ExecResult
from agentgym.branching.ends import RolloutBranch
from agentgym.branching.settings import Branching
from agentgym.data.chosen import split, where
from agentgym.data.endless import Endless
from agentgym.data.procedural import Procedural
from agentgym.data.rows import Rows
from agentgym.engines.base import Engine
from agentgym.environments.context_policies import Compact, KeepLast, Window
from agentgym.environments.env import Env, Split
from agentgym.environments.limits import Limits
from agentgym.environments.mixture import Member, mix
from agentgym.environments.parameters import Parameter
from agentgym.environments.registry import find_env, register
from agentgym.environments.resources import open_resources
from agentgym.environments.rewards import reward
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import (
    AgentGymError,
    BoxKilledError,
    ClosedError,
    ContextOverflow,
    EngineError,
    EnvError,
    Failure,
    SandboxError,
    ToolError,
)
from agentgym.extras import needs_extra as _needs_extra
from agentgym.games.game import Game, GameTask, IllegalMove
from agentgym.messages import Image, Message
from agentgym.rollouts.rollout import rollout
from agentgym.samples import SampleBatch, build_samples, demonstrations
from agentgym.scheduling.accounting import Groups
from agentgym.scheduling.group_state import GroupSettings
from agentgym.scheduling.oversampling import Oversample
from agentgym.scheduling.run_groups import run_groups
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import TaskSampler, batches
from agentgym.tools.dynamic import DynamicTool, tools_of
from agentgym.tools.tool import Stop, tool
from agentgym.types import Completion, Group, Rollout, Sample, Sampling, Segment, StepResult, StopReason, Task, Turn

if _TYPE_CHECKING:
    from agentgym.chat.tokenizer import chat_tokenizer
    from agentgym.cluster.config import ClusterConfig
    from agentgym.engines.adapter_files import read_adapter
    from agentgym.engines.endpoint.endpoint import Endpoint
    from agentgym.engines.other import OtherEngine
    from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
    from agentgym.engines.transformers.engine import LocalConfig, LocalEngine
    from agentgym.evals.comparison import Comparison, compare
    from agentgym.evals.evaluate import evaluate
    from agentgym.evals.evaluation import Evaluation
    from agentgym.run.command import main
    from agentgym.run.config import EvalSampling, NamedModel, RunConfig, TrainSampling
    from agentgym.run.distributed_rollouts import Collector
    from agentgym.run.log import MetricsLogger
    from agentgym.run.loop import train_policy
    from agentgym.run.sync.weights import WeightSync
    from agentgym.sandboxes.choose import AnyBox
    from agentgym.sandboxes.docker import Docker
    from agentgym.sandboxes.local import Bubblewrap, Process
    from agentgym.sandboxes.networks.rules import Allow
    from agentgym.sandboxes.networks.services import Service
    from agentgym.tools.mcp_server import MCP
    from agentgym.train.config import TrainConfig
    from agentgym.train.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "MCP",
    "AgentEnv",
    "AgentGymError",
    "Allow",
    "AnyBox",
    "Box",
    "BoxKilledError",
    "Branching",
    "Bubblewrap",
    "ClosedError",
    "ClusterConfig",
    "Collector",
    "Compact",
    "Comparison",
    "Completion",
    "ContextOverflow",
    "Docker",
    "DynamicTool",
    "Endless",
    "Endpoint",
    "Engine",
    "EngineError",
    "Env",
    "EnvError",
    "EvalSampling",
    "Evaluation",
    "ExecResult",
    "Failure",
    "Game",
    "GameTask",
    "Group",
    "GroupSettings",
    "Groups",
    "IllegalMove",
    "Image",
    "Judge",
    "KeepLast",
    "Limits",
    "LocalConfig",
    "LocalEngine",
    "Member",
    "Message",
    "MetricsLogger",
    "NamedModel",
    "OtherEngine",
    "Oversample",
    "Parameter",
    "Procedural",
    "Process",
    "Rollout",
    "RolloutBranch",
    "Rows",
    "RunConfig",
    "SGLangConfig",
    "SGLangEngine",
    "Sample",
    "SampleBatch",
    "Sampling",
    "SandboxError",
    "Scheduler",
    "Segment",
    "Service",
    "SimulatedUser",
    "Split",
    "StepResult",
    "Stop",
    "StopReason",
    "Task",
    "TaskSampler",
    "ToolEnv",
    "ToolError",
    "TrainConfig",
    "TrainSampling",
    "Trainer",
    "Turn",
    "UserEnv",
    "WeightSync",
    "Window",
    "__version__",
    "batches",
    "build_samples",
    "chat_tokenizer",
    "compare",
    "demonstrations",
    "evaluate",
    "find_env",
    "main",
    "mix",
    "open_resources",
    "read_adapter",
    "register",
    "reward",
    "rollout",
    "run_groups",
    "split",
    "tool",
    "tools_of",
    "train_policy",
    "where",
]

_LAZY = {
    "agentgym.chat.tokenizer": ("chat_tokenizer",),
    "agentgym.cluster.config": ("ClusterConfig",),
    "agentgym.engines.adapter_files": ("read_adapter",),
    "agentgym.engines.endpoint.endpoint": ("Endpoint",),
    "agentgym.engines.other": ("OtherEngine",),
    "agentgym.engines.sglang.engine": (
        "SGLangConfig",
        "SGLangEngine",
    ),
    "agentgym.engines.transformers.engine": (
        "LocalConfig",
        "LocalEngine",
    ),
    "agentgym.evals.comparison": (
        "Comparison",
        "compare",
    ),
    "agentgym.evals.evaluate": ("evaluate",),
    "agentgym.evals.evaluation": ("Evaluation",),
    "agentgym.run.command": ("main",),
    "agentgym.run.config": (
        "EvalSampling",
        "NamedModel",
        "RunConfig",
        "TrainSampling",
    ),
    "agentgym.run.distributed_rollouts": ("Collector",),
    "agentgym.run.log": ("MetricsLogger",),
    "agentgym.run.loop": ("train_policy",),
    "agentgym.run.sync.weights": ("WeightSync",),
    "agentgym.sandboxes.choose": ("AnyBox",),
    "agentgym.sandboxes.docker": ("Docker",),
    "agentgym.sandboxes.local": (
        "Bubblewrap",
        "Process",
    ),
    "agentgym.sandboxes.networks.rules": ("Allow",),
    "agentgym.sandboxes.networks.services": ("Service",),
    "agentgym.tools.mcp_server": ("MCP",),
    "agentgym.train.config": ("TrainConfig",),
    "agentgym.train.trainer": ("Trainer",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym' has no attribute {name!r}")
    with _needs_extra():
        return getattr(_importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]

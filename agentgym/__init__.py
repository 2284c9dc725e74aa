"""Train language-model agents by reinforcement learning.

Importing this package loads nothing: each name is loaded on first use. `agentgym.testing` has what tests need.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from agentgym.agents.env import AgentEnv
    from agentgym.asking.judge import Judge
    from agentgym.asking.user import SimulatedUser, UserEnv
    from agentgym.boxes import Box, ExecResult
    from agentgym.branching.ends import RolloutBranch
    from agentgym.branching.settings import Branching
    from agentgym.chat.tokenizer import chat_tokenizer
    from agentgym.cluster.config import ClusterConfig
    from agentgym.credit.gae import GAE
    from agentgym.data.chosen import split, where
    from agentgym.data.endless import Endless
    from agentgym.data.procedural import Procedural
    from agentgym.data.rows import Rows
    from agentgym.engines.adapter_files import read_adapter
    from agentgym.engines.base import Engine
    from agentgym.engines.endpoint.endpoint import Endpoint
    from agentgym.engines.other import OtherEngine
    from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
    from agentgym.engines.transformers.engine import LocalConfig, LocalEngine
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
        BoxContentError,
        BoxKilledError,
        ClosedError,
        ContextOverflow,
        EngineError,
        EnvError,
        Failure,
        MachineError,
        SandboxError,
        ToolError,
    )
    from agentgym.evals.comparison import Comparison, compare
    from agentgym.evals.evaluate import evaluate
    from agentgym.evals.evaluation import Evaluation
    from agentgym.games.game import Game, GameTask, IllegalMove
    from agentgym.messages import Image, Message
    from agentgym.rollouts.rollout import rollout
    from agentgym.run.command import main
    from agentgym.run.config import EvalSampling, NamedModel, RunConfig, TrainSampling
    from agentgym.run.distributed_rollouts import Collector
    from agentgym.run.log import MetricsLogger
    from agentgym.run.loop import train_policy
    from agentgym.run.sync.weights import WeightSync
    from agentgym.samples import SampleBatch, build_samples, demonstrations, value_samples
    from agentgym.sandboxes.choose import AnyBox
    from agentgym.sandboxes.docker import Docker
    from agentgym.sandboxes.local import Bubblewrap, Process
    from agentgym.sandboxes.networks.rules import Allow
    from agentgym.sandboxes.networks.services import Service
    from agentgym.scheduling.accounting import Groups
    from agentgym.scheduling.group_state import GroupSettings
    from agentgym.scheduling.oversampling import Oversample
    from agentgym.scheduling.run_groups import run_groups
    from agentgym.scheduling.scheduler import Scheduler
    from agentgym.scheduling.task_sampler import TaskSampler, batches
    from agentgym.tools.dynamic import DynamicTool, tools_of
    from agentgym.tools.mcp_server import MCP
    from agentgym.tools.tool import Stop, tool
    from agentgym.train.config import TrainConfig
    from agentgym.train.trainer import Trainer
    from agentgym.types import Completion, Group, Rollout, Sample, Sampling, Segment, StepResult, StopReason, Task, Turn

__version__ = "0.1.0"

__all__ = [
    "GAE",
    "MCP",
    "AgentEnv",
    "AgentGymError",
    "Allow",
    "AnyBox",
    "Box",
    "BoxContentError",
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
    "MachineError",
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
    "value_samples",
    "where",
]

_LAZY = {
    "agentgym.agents.env": ("AgentEnv",),
    "agentgym.asking.judge": ("Judge",),
    "agentgym.asking.user": (
        "SimulatedUser",
        "UserEnv",
    ),
    "agentgym.boxes": (
        "Box",
        "ExecResult",
    ),
    "agentgym.branching.ends": ("RolloutBranch",),
    "agentgym.branching.settings": ("Branching",),
    "agentgym.chat.tokenizer": ("chat_tokenizer",),
    "agentgym.cluster.config": ("ClusterConfig",),
    "agentgym.credit.gae": ("GAE",),
    "agentgym.data.chosen": (
        "split",
        "where",
    ),
    "agentgym.data.endless": ("Endless",),
    "agentgym.data.procedural": ("Procedural",),
    "agentgym.data.rows": ("Rows",),
    "agentgym.engines.adapter_files": ("read_adapter",),
    "agentgym.engines.base": ("Engine",),
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
    "agentgym.environments.context_policies": (
        "Compact",
        "KeepLast",
        "Window",
    ),
    "agentgym.environments.env": (
        "Env",
        "Split",
    ),
    "agentgym.environments.limits": ("Limits",),
    "agentgym.environments.mixture": (
        "Member",
        "mix",
    ),
    "agentgym.environments.parameters": ("Parameter",),
    "agentgym.environments.registry": (
        "find_env",
        "register",
    ),
    "agentgym.environments.resources": ("open_resources",),
    "agentgym.environments.rewards": ("reward",),
    "agentgym.environments.tool_env": ("ToolEnv",),
    "agentgym.errors": (
        "AgentGymError",
        "BoxContentError",
        "BoxKilledError",
        "ClosedError",
        "ContextOverflow",
        "EngineError",
        "EnvError",
        "Failure",
        "MachineError",
        "SandboxError",
        "ToolError",
    ),
    "agentgym.evals.comparison": (
        "Comparison",
        "compare",
    ),
    "agentgym.evals.evaluate": ("evaluate",),
    "agentgym.evals.evaluation": ("Evaluation",),
    "agentgym.games.game": (
        "Game",
        "GameTask",
        "IllegalMove",
    ),
    "agentgym.messages": (
        "Image",
        "Message",
    ),
    "agentgym.rollouts.rollout": ("rollout",),
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
    "agentgym.samples": (
        "SampleBatch",
        "build_samples",
        "demonstrations",
        "value_samples",
    ),
    "agentgym.sandboxes.choose": ("AnyBox",),
    "agentgym.sandboxes.docker": ("Docker",),
    "agentgym.sandboxes.local": (
        "Bubblewrap",
        "Process",
    ),
    "agentgym.sandboxes.networks.rules": ("Allow",),
    "agentgym.sandboxes.networks.services": ("Service",),
    "agentgym.scheduling.accounting": ("Groups",),
    "agentgym.scheduling.group_state": ("GroupSettings",),
    "agentgym.scheduling.oversampling": ("Oversample",),
    "agentgym.scheduling.run_groups": ("run_groups",),
    "agentgym.scheduling.scheduler": ("Scheduler",),
    "agentgym.scheduling.task_sampler": (
        "TaskSampler",
        "batches",
    ),
    "agentgym.tools.dynamic": (
        "DynamicTool",
        "tools_of",
    ),
    "agentgym.tools.mcp_server": ("MCP",),
    "agentgym.tools.tool": (
        "Stop",
        "tool",
    ),
    "agentgym.train.config": ("TrainConfig",),
    "agentgym.train.trainer": ("Trainer",),
    "agentgym.types": (
        "Completion",
        "Group",
        "Rollout",
        "Sample",
        "Sampling",
        "Segment",
        "StepResult",
        "StopReason",
        "Task",
        "Turn",
    ),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentgym' has no attribute {name!r}")
    from agentgym.extras import needs_extra

    with needs_extra():
        value = getattr(_importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]

"""The public names of agentgym, each with the module that defines it: the only list of them.

`__init__.py` reads it, and imports a module when one of its names is first used.
"""

from .advantages.gae import GAEConfig as GAEConfig
from .agent_api.env import AgentEnv as AgentEnv
from .chat.tokenizer import chat_tokenizer as chat_tokenizer
from .cli.recipe import main as main
from .data.chosen import split as split
from .data.chosen import where as where
from .data.endless import Endless as Endless
from .data.endless import Procedural as Procedural
from .data.rows import Rows as Rows
from .engines.adapter_files import read_adapter as read_adapter
from .engines.base import Engine as Engine
from .engines.custom import CustomEngineConfig as CustomEngineConfig
from .engines.endpoint.endpoint import Endpoint as Endpoint
from .engines.sglang.engine import SGLangConfig as SGLangConfig
from .engines.sglang.engine import SGLangEngine as SGLangEngine
from .engines.transformers.engine import TransformersConfig as TransformersConfig
from .engines.transformers.engine import TransformersEngine as TransformersEngine
from .environments.env import Env as Env
from .environments.env import Split as Split
from .environments.game import Game as Game
from .environments.game import GameTask as GameTask
from .environments.game import IllegalMove as IllegalMove
from .environments.limits import Compact as Compact
from .environments.limits import KeepLast as KeepLast
from .environments.limits import Limits as Limits
from .environments.limits import Window as Window
from .environments.mixture import Member as Member
from .environments.mixture import mix as mix
from .environments.parameters import Parameter as Parameter
from .environments.registry import find_env as find_env
from .environments.registry import register as register
from .environments.resources import open_resources as open_resources
from .environments.rewards import reward as reward
from .environments.tool_env import ToolEnv as ToolEnv
from .errors import (
    AgentGymError as AgentGymError,
)
from .errors import (
    ClosedError as ClosedError,
)
from .errors import (
    ContextOverflow as ContextOverflow,
)
from .errors import (
    EngineError as EngineError,
)
from .errors import (
    EnvError as EnvError,
)
from .errors import (
    Failure as Failure,
)
from .errors import (
    MachineError as MachineError,
)
from .errors import (
    SandboxContentError as SandboxContentError,
)
from .errors import (
    SandboxError as SandboxError,
)
from .errors import (
    SandboxKilledError as SandboxKilledError,
)
from .errors import (
    ToolError as ToolError,
)
from .evals.comparison import Comparison as Comparison
from .evals.comparison import compare as compare
from .evals.evaluation import Evaluation as Evaluation
from .judges.judge import Judge as Judge
from .judges.simulated_user import SimulatedUser as SimulatedUser
from .judges.simulated_user import UserEnv as UserEnv
from .launch.evaluate import evaluate as evaluate
from .launch.train import train_policy as train_policy
from .rollouts.rollout import rollout as rollout
from .run.callbacks import Callback as Callback
from .run.cluster_config import ClusterConfig as ClusterConfig
from .run.collector import Collector as Collector
from .run.config import (
    ModelRoleConfig as ModelRoleConfig,
)
from .run.config import (
    RunConfig as RunConfig,
)
from .run.metrics_logger import MetricsLogger as MetricsLogger
from .samples import (
    SampleBatch as SampleBatch,
)
from .samples import (
    build_samples as build_samples,
)
from .samples import (
    demonstrations as demonstrations,
)
from .samples import (
    value_samples as value_samples,
)
from .sandboxes.choose import AnySandbox as AnySandbox
from .sandboxes.docker.docker import Docker as Docker
from .sandboxes.local.local import Bubblewrap as Bubblewrap
from .sandboxes.local.local import Process as Process
from .sandboxes.network.rules import Allow as Allow
from .sandboxes.network.services import Service as Service
from .sandboxes.protocol import ExecResult as ExecResult
from .sandboxes.protocol import Sandbox as Sandbox
from .scheduling.accounting import Groups as Groups
from .scheduling.oversampling import OversampleConfig as OversampleConfig
from .scheduling.run_groups import run_groups as run_groups
from .scheduling.schedule import Schedule as Schedule
from .scheduling.scheduler import Scheduler as Scheduler
from .scheduling.task_sampler import TaskSampler as TaskSampler
from .scheduling.task_sampler import batches as batches
from .tools.dynamic import DynamicTool as DynamicTool
from .tools.dynamic import tools_of as tools_of
from .tools.mcp_client import MCP as MCP
from .tools.tool import Stop as Stop
from .tools.tool import tool as tool
from .train.config import TrainConfig as TrainConfig
from .train.trainer import Trainer as Trainer
from .types.branching import BranchingConfig as BranchingConfig
from .types.completion import Completion as Completion
from .types.completion import Sampling as Sampling
from .types.messages import Image as Image
from .types.messages import Message as Message
from .types.rollout import (
    Group as Group,
)
from .types.rollout import (
    Rollout as Rollout,
)
from .types.rollout import (
    RolloutBranch as RolloutBranch,
)
from .types.rollout import (
    Segment as Segment,
)
from .types.rollout import (
    StopReason as StopReason,
)
from .types.rollout import (
    Turn as Turn,
)
from .types.sample import Sample as Sample
from .types.task import StepResult as StepResult
from .types.task import Task as Task
from .weight_sync.sync import WeightSync as WeightSync

__all__: list[str]
__version__: str

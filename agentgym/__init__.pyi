"""The public names of agentgym, each with the module that defines it: the only list of them.

`__init__.py` reads it, and imports a module when one of its names is first used.
"""

from .advantages.gae import GAEConfig as GAEConfig
from .agent_api.env import AgentEnv as AgentEnv
from .cli.recipe import main as main
from .data.chosen import split as split, where as where
from .data.endless import Endless as Endless, Procedural as Procedural
from .data.rows import Rows as Rows
from .engines.custom import CustomEngineConfig as CustomEngineConfig
from .engines.endpoint.endpoint import Endpoint as Endpoint
from .engines.sglang.engine import SGLangConfig as SGLangConfig
from .engines.transformers.engine import (
    TransformersConfig as TransformersConfig,
    TransformersEngine as TransformersEngine,
)
from .environments.env import Env as Env, Split as Split
from .environments.game import Game as Game
from .environments.limits import Compact as Compact, KeepLast as KeepLast, Limits as Limits, Window as Window
from .environments.mixture import Member as Member, mix as mix
from .environments.parameters import Parameter as Parameter
from .environments.registry import find_env as find_env, register as register
from .environments.resources import open_resources as open_resources
from .environments.rewards import reward as reward
from .environments.tool_env import ToolEnv as ToolEnv
from .errors import ToolError as ToolError
from .evals.comparison import compare as compare
from .evals.evaluation import Evaluation as Evaluation
from .judges.judge import Judge as Judge
from .judges.simulated_user import SimulatedUser as SimulatedUser
from .launch.evaluate import evaluate as evaluate
from .launch.train import train_policy as train_policy
from .rollouts.rollout import rollout as rollout
from .run.callbacks import Callback as Callback
from .run.cluster_config import ClusterConfig as ClusterConfig
from .run.config import ModelRoleConfig as ModelRoleConfig, RunConfig as RunConfig
from .sandboxes.choose import AnySandbox as AnySandbox
from .sandboxes.docker.docker import Docker as Docker
from .sandboxes.local.local import Bubblewrap as Bubblewrap, Process as Process
from .sandboxes.network.rules import Allow as Allow
from .sandboxes.network.services import Service as Service
from .sandboxes.protocol import Sandbox as Sandbox
from .scheduling.oversampling import OversampleConfig as OversampleConfig
from .tools.mcp_client import MCP as MCP
from .tools.tool import Stop as Stop, tool as tool
from .train.config import TrainConfig as TrainConfig
from .types.branching import BranchingConfig as BranchingConfig
from .types.completion import Sampling as Sampling
from .types.messages import Image as Image, Message as Message
from .types.rollout import Rollout as Rollout
from .types.task import StepResult as StepResult, Task as Task

__all__: list[str]
__version__: str

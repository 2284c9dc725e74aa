"""The public names of agentgym.scheduling, each with the module that defines it."""

from .accounting import Groups as Groups
from .run_groups import run_groups as run_groups
from .schedule import Schedule as Schedule
from .scheduler import Scheduler as Scheduler
from .task_sampler import TaskSampler as TaskSampler, batches as batches

__all__: list[str]

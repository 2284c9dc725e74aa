"""The public names of agentgym.types, each with the module that defines it."""

from .completion import Completion as Completion
from .rollout import (
    Group as Group,
    RolloutBranch as RolloutBranch,
    Segment as Segment,
    StopReason as StopReason,
    Turn as Turn,
)
from .sample import Sample as Sample

__all__: list[str]

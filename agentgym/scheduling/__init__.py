"""Scheduling of many rollouts: task order, groups, batches and their counts."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

"""Evaluations: running a model on held-out tasks, and storing, scoring and comparing the results."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

"""Evaluations: a model played on tasks that it is not trained on, kept, scored and compared."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

"""Engines, which sample from models: they take token ids, and return token ids with their log-probabilities."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

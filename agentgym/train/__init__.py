"""The trainer, which turns samples into gradients. It knows the types, but no environments, rollouts or sandboxes."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

"""Weight sync: loads each new policy into the engine, and checks that the engine samples from it."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

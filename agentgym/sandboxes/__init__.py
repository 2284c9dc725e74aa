"""The host's side of sandboxes. It imports no environments and no rollouts: an environment is given its sandbox."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

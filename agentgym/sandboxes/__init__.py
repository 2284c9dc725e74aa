"""The host's side of sandboxes. Imports neither environments nor rollouts: an environment receives its sandbox."""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

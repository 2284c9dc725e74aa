"""What travels between the rooms: frozen, validated types, each in the module that is named after it.

The way of a token: `Completion` (engines), `Segment` (rollouts), `Sample` (samples.py), `Batch` (train/batching), loss.
Arrays are read-only NumPy vectors, so a slice of a segment is a view and costs nothing.
"""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

"""Frozen, validated types that several packages share, each in the module named after it.

A token's path: `Completion` (engines), `Segment` (rollouts), `Sample` (samples.py), `Batch` (train/batching), loss.
Arrays are read-only NumPy vectors, so a slice of a segment is a view and costs nothing.
"""

from agentgym.errors.extras import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

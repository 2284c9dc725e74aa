"""Metrics of a run in addition to its rewards: step times, the engine's mismatch, and warnings."""

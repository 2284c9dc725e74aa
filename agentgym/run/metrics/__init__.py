"""Metrics of a run beside its rewards: what a step took, how far the engine is off, and what goes wrong."""

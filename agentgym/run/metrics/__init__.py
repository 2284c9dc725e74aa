"""Metrics of a run besides its rewards: a step's time, the engine's mismatch, and warnings."""

"""The held-out evaluations of a run."""

"""Branches of a rollout: the states they start from, and how they are run."""

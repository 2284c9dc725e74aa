"""Branches of a rollout: which of its states they begin at, and how they are played."""

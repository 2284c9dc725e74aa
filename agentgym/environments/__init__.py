"""Environments: one class, one instance a rollout."""

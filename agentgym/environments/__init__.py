"""Environments: what the model can do in a task, and what it is worth."""

"""Advantages: of a rollout within its group, and of each turn, at each level of credit."""

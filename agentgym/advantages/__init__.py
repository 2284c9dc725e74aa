"""Advantages of rollouts within their groups and of single turns, at each level of credit."""

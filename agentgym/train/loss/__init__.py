"""Losses, log-probabilities, and the search for the rollouts whose loss or gradient isn't finite."""

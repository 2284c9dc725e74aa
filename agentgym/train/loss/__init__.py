"""Losses, log-probabilities, and the search for the rollouts that made a step unusable."""

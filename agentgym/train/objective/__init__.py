"""Losses, log-probabilities and what makes a step unusable."""

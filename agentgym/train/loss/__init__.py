"""Losses, log-probabilities, and the search for what made a step unusable."""

"""Branches of rollouts: their settings, their ends, and the copy of an env that each begins with."""

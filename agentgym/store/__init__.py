"""The rollouts of a run on disk: written while it runs, read by every window on it."""

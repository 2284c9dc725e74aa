"""The folders that runs and evaluations write: names, what their disk takes, and where they are now."""

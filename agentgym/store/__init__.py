"""The on-disk store of a run's rollouts: written while the run is active, read by every viewer."""

"""The envs and tasks of a run."""

"""The commands for evaluations."""

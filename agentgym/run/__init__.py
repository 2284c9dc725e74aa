"""A training run: its settings, its loop, its log and what it needs to go on after a stop."""

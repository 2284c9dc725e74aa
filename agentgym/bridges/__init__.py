"""Adapters to other libraries' environments."""

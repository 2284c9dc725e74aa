"""Adapters to and from other libraries' environments."""

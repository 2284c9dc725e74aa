"""The embedded engine: a transformers model in a thread of this process."""

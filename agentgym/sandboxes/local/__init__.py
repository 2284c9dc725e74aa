"""Sandboxes on this machine without containers: bubblewrap, and unprotected processes."""

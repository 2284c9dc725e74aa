"""Handling of what the machine does to rollouts: stopped processes, and a shortage of threads or file descriptors."""

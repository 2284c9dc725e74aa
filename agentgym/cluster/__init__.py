"""A run's parts as Ray actors: rollout workers, trainers and servers.

The driver is the process that starts and calls them.
"""

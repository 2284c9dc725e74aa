"""The host's side of boxes. It imports no environments and no rollouts: an environment is given its box."""

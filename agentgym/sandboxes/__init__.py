"""The host's side of sandboxes. It imports no environments and no rollouts: an environment is given its sandbox."""

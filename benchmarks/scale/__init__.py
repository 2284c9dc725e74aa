"""The benchmark of rollout workers on Ray."""

"""Credit: which advantage each turn of a rollout has, on each level."""

"""Many rollouts: task order, groups, batches and their accounts."""

"""The benchmark of baselines once a rollout, beside other kits' advantages."""

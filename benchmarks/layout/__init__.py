"""The benchmark of step samples in each layout, compared with other kits."""

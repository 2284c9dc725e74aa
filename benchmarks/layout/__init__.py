"""The benchmark of step samples in each layout, beside other kits."""

"""Full-text search of runs: an index of the viewer's own, and the thread that keeps it."""

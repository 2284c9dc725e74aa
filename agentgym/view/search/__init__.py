"""Full-text search over runs: a separate index that the viewer owns, and the thread that keeps it up to date."""

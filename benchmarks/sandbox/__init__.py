"""The benchmark of the code sandbox, beside the same work by other means."""

"""The benchmark of the code sandbox, compared with other ways to do the same work."""

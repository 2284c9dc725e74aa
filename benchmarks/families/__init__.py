"""The benchmark of model families, in each layout beside the plain forward of each sequence alone."""

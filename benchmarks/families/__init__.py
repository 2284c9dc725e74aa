"""The benchmark of model families: each layout compared with the plain forward pass of each sequence alone."""

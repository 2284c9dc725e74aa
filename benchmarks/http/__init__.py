"""The benchmark of asking a server over HTTP, beside loops and bare clients."""

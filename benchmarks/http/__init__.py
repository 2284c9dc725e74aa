"""The benchmark of requests to a server over HTTP, compared with loops and bare clients."""

"""Images of Docker sandboxes: the server is added to any image, and packages on top if needed."""

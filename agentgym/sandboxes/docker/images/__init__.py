"""Images of Docker sandboxes: any image gets the server, and packages on top where they are asked for."""

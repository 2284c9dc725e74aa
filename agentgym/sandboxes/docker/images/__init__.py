"""Images of Docker boxes: any image gets the server, and packages on top where they are asked for."""

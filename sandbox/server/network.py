"""Internet sockets of the sandbox's network, created when the server starts and handed to the host."""

from __future__ import annotations

import socket

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any

BACKLOG = 64


def hand_over(wire: int, config: dict[str, Any]) -> None:
    """Create a listener if requested, and unconnected sockets; send all of them over the connection and keep none.

    A socket belongs forever to the network in which it was created. So the host accepts and connects in this sandbox's
    network with these sockets, without a process in here that code could stop or that a reset would end.
    """
    made = []
    try:
        if config["listen"] is not None:
            listener = socket.socket()
            made.append(listener)
            listener.bind(("127.0.0.1", config["listen"]))
            listener.listen(BACKLOG)
        made += [socket.socket() for _ in range(config["sockets"])]
        with socket.socket(fileno=wire) as end:
            socket.send_fds(end, [b"\0"], [each.fileno() for each in made])
            end.detach()
    finally:
        for each in made:
            each.close()

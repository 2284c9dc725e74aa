"""Boxes in containers: the engine and its client, the wire to a box, settings, heartbeat, the image's name."""

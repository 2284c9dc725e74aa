"""Sandboxes in containers: the engine and its client, the wire to a sandbox, settings, heartbeat, the image's
name."""

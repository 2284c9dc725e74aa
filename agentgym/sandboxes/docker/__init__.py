"""Sandboxes in containers: the engine and its client, the connection to a sandbox, settings, heartbeats and images."""

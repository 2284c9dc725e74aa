"""The network that a sandbox may reach: its loopback, the allowed hosts behind a logging proxy, and its services."""

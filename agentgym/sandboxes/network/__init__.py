"""What a sandbox may reach: its loopback, hosts on a list, services beside it; and what reaches it."""

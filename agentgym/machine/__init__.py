"""Time limits that pause with the process, work that can't be cancelled, and identities of processes."""

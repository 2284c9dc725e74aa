"""Time limits that pause with the process, work that can't be canceled, and identities of processes."""

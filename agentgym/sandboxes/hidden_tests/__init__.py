"""The verification of a sandbox's files by hidden tests: what runs in the sandbox, and what decides on the host."""

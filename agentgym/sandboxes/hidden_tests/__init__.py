"""Hidden tests for a sandbox's files: the programs that run in the sandbox, and the judging on the host."""

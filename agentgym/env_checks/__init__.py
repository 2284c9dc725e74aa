"""What `agentgym.testing.check_env` checks, one module a question."""

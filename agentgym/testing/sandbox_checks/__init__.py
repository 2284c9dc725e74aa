"""The checks behind `agentgym.testing.check_sandbox`, which run in real sandboxes."""

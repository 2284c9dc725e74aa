"""The checks behind `agentgym.testing.check_env`, one module for each question."""

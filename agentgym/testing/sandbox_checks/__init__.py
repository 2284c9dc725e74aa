"""What every sandbox owes its users, as checks of real sandboxes: behind `agentgym.testing.check_sandbox`."""

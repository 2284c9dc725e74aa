"""What every sandbox owes its users, as checks of real boxes: behind `agentgym.testing.check_sandbox`."""

"""Support for agent programs that don't use agentgym: the API that they query, and the env that runs them."""

"""Agent programs that know nothing of agentgym: the API that they ask, and the env that runs them."""

"""Support for agent programs that don't use agentgym: the API that they send requests to, and the env that runs
them.
"""

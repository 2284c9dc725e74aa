"""Starts runs and evaluations, and chooses where their parts are: in the processes that were started, or on Ray."""

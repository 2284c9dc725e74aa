"""Starts runs and evaluations, and chooses where their parts are: in this process, under torchrun, or on Ray."""

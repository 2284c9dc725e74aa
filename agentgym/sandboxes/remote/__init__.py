"""The calls of a sandbox over its connection: programs, processes, shells and files."""

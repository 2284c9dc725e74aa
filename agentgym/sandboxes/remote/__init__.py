"""The calls of a sandbox over a wire: programs, processes, shells and files."""

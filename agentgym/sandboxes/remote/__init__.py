"""The calls of a box over a wire: programs, processes, shells and files."""

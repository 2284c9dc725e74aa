"""Tools from typed methods, and the threads that plain ones run in."""

"""Files that somebody else may have made: opened, unpacked and parsed within limits, and never written to.

A run folder, a trajectory or an adapter may come from a stranger. All that reads one opens it here.
"""

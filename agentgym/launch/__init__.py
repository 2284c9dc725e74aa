"""Starting of runs and evaluations, in the current processes or on Ray."""

"""Functions that start runs and evaluations, in the current processes or on Ray."""

"""The folders that runs and evaluations write to: their names, full disks, and where they are after a move."""

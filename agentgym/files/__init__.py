"""Output folders of runs and evaluations: names, locks, full disks, moved folders, and untrusted files."""

"""The verification of a box's files by hidden tests: what runs in the box, and what decides on the host."""

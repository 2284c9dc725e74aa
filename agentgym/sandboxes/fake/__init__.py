"""The parts of fake sandboxes: programs, Python cells and files."""

"""The parts of fake sandboxes: their programs, their cells and their files."""

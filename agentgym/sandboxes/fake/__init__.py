"""The parts of fake boxes: their programs, their cells and their files."""

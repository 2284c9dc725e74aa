"""The commands for creating, finding, checking, playing, serving and training on environments."""

"""What the embedded engine and the trainer share about a language model: parts of its computation, and defaults."""

"""Parts of a transformers language model's computation that the embedded engine and the trainer share."""

"""An engine for OpenAI-compatible chat endpoints, for evaluation."""

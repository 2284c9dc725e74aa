"""The engine for SGLang servers."""

"""The engine of SGLang servers."""

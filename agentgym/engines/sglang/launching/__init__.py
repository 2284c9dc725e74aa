"""SGLang servers that an engine launches: their GPUs, processes and logs."""

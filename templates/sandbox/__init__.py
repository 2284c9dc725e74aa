"""The environment `sandbox_template`."""

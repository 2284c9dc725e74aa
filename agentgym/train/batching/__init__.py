"""Samples to tensors: planning, packing and layouts."""

"""The road from samples to tensors: plans, packing and layouts."""

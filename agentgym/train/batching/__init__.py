"""From samples to tensors: plans, packing and layouts."""

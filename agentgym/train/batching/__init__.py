"""Turns samples into tensors: plans micro-batches, packs samples into them, and lays them out for a forward pass."""

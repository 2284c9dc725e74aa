"""Samples to gradients: knows the types, never environments, rollouts or sandboxes."""

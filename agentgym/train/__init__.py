"""The trainer: samples to gradients. It knows the types, but no environments, rollouts or sandboxes."""

"""What the machine does to a rollout: it stops, and it runs out of threads, descriptors and memory."""

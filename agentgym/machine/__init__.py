"""What the machine does to rollouts: it stops the process, and it runs out of threads or file descriptors."""

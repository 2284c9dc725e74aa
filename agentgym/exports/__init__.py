"""Export and import of rollouts: ATIF trajectories, and the JSON Lines that chat-model trainers read."""

"""A run's parts as Ray actors: rollout workers, trainers and servers, coordinated by one driver."""

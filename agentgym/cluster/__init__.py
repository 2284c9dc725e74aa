"""The parts of a run in other processes: rollout workers, trainers and servers as Ray actors, one driver before them."""

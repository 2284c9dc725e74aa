"""The parts of a run as Ray actors: rollout workers, trainers and servers, with one driver before them."""

"""Weight sync: gives the engine each new policy, and checks that it samples from it."""

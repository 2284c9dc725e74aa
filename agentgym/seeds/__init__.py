"""Seeds: one function derives the seed of everything that is left to chance."""

from agentgym.seeds.derivation import VERSION, Purpose, seed_for

__all__ = ["VERSION", "Purpose", "seed_for"]
